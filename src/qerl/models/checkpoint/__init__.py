"""Files of models: where they lie, how their tensors are named and stored, tokenizers."""

"""The forward pass over prompts, in chunks."""

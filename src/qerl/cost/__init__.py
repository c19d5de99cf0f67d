"""The cost of a model by its shape: bytes of weights, caches and activations, operations, experts read."""

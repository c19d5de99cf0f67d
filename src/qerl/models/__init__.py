"""The decoder with its adapter, and the loaders and writers of checkpoints."""

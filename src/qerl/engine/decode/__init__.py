"""The forward pass of a decode step and the recorded runners that launch it."""

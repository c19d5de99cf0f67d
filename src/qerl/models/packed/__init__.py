"""Packed weights in the order in which the kernels read them, and what several linears read at once."""

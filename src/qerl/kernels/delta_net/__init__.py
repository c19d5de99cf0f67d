"""Gated DeltaNet: its chunked pass, its decode step and its short convolution."""

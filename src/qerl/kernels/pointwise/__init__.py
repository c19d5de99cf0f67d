"""Norms, activations, small sums, and the fp32 products of gradients."""

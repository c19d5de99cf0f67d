"""Packed layouts of weights, their choice of tiles, and the products with packed weights."""

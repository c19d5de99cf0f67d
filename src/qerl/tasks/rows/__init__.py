"""Rows of data sets: read from files and the hub, rendered as prompts and as demonstrations."""

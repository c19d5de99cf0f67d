"""The decoder with its adapter and its noise, and how it is loaded."""

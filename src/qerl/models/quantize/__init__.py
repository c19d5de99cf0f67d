"""Rounding a model to few bits, with or without calibration, and what that costs."""

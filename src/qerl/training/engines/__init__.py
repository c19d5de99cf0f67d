"""Engines of a run that sample elsewhere or several turns."""

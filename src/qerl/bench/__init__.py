"""Measure decode, rollouts, updates and whole steps with random weights in the shapes of real models."""

"""Adaptive Quantization Noise: sigma by step, the noise in the norms, and AQN in a run."""

"""Compiling, launching and recording of CUDA kernels, and the memory of device and host."""

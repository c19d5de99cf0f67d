"""One op a file, each with its float64 reference."""

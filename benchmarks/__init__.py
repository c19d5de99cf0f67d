"""Benchmarks for this repository's pages: linears beside other libraries, tile tuning, parity, tables."""

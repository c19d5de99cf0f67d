"""Adapters in the files and names of PEFT."""

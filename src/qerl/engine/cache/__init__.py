"""Keys, values and recurrent states: their memory, layout and size."""

"""Which samples run, and which pages they hold."""

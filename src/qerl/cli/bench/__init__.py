"""How fast it is, beside others and beside the hardware's limit: measured, recorded, shown as tables."""

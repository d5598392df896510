"""TODO: linear."""

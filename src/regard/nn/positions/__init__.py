"""TODO: positions."""

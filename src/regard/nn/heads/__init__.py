"""TODO: heads."""

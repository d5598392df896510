"""TODO: image."""

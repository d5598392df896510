"""Linear attention and fast weights."""

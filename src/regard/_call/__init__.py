"""TODO: _call."""

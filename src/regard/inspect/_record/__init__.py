"""TODO: _record."""

"""TODO: _utils."""

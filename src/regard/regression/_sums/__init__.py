"""TODO: _sums."""

"""TODO: _capture."""

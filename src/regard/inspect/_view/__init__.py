"""TODO: _view."""

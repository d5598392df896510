"""Records as pages, pictures and text."""

"""Attention over images."""

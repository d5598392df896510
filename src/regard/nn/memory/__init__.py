"""Attention to an external memory."""

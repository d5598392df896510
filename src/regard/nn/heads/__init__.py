"""Attention in one head or several."""

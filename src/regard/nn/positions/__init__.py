"""Positions: added, relative and rotary."""

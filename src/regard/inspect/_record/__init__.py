"""What was recorded of calls of attention, as data."""

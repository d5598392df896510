"""Data to learn from: files that a user names, pairs of lines, and batches."""

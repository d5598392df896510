"""Training and translation beside JoeyNMT: the same shapes, batches and data, in turns."""

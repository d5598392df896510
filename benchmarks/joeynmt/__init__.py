"""Training and translation compared with JoeyNMT: the same shapes, batches and data, taking turns."""

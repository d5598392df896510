"""Training of any model: the loop, its options, checkpoints, logs and losses."""

"""Tasks that models learn: each with its data, options, runs and metrics."""

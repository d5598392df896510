"""Private helpers of the library: errors, constraints, files, and private names of torch."""

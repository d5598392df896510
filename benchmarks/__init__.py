"""Benchmarks: cases × contenders, checked against float64 before they are timed. See ``python -m benchmarks --help``."""

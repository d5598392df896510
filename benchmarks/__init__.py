"""Benchmarks: cases × contenders, checked before they are timed. See ``python -m benchmarks --help``."""

"""Compiled CPU kernels that run tile by tile."""

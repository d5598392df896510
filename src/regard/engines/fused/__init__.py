"""Fused CPU kernels: compiled once, kept as machine code, run tile by tile."""

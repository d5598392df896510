"""Fused kernels for GPUs, in Triton."""

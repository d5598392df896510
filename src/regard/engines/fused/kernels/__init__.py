"""The kernels in Numba, one idea per file; imported only when one has to be compiled."""

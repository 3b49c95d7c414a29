"""Triton kernels of attention over the paged pool. Imported only by backends of CUDA devices."""

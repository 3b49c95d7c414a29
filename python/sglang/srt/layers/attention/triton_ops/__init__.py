"""Triton kernels of attention over the paged pool. Imported only by the `triton` backend."""

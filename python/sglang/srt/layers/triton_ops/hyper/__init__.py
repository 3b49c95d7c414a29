"""Kernels of hyper-connections: residual streams that are mixed around each block."""

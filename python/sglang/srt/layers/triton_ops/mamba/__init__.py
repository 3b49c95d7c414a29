"""Kernels of Mamba-2."""

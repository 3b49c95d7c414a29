"""Kernels for weights with scales: fp8 and 4 bits."""

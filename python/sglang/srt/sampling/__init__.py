"""Sampling parameters of a request: plain values, no tensors."""

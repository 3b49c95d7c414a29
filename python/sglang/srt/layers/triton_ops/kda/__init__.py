"""Kernels of Kimi Delta Attention (KDA): the delta rule with a decay for each key channel."""

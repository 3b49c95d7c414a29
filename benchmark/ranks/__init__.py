"""Collectives of several ranks of one machine over gloo: ticks, and context parallelism."""

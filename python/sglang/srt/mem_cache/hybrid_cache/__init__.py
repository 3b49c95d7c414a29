"""Stacks of host pools for models whose state is of one kind or of several."""

"""Sizes of models and tiers before a server starts: the parts of `sglang.hicache_plan`."""

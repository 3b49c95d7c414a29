"""Rigs: what the tests share, and benchmarks drive. Not a part of the installed package."""

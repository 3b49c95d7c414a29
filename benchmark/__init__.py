"""Benchmarks of the engine: `python -m benchmark --help` lists the commands."""

"""Everything particular to a kind of device: its facts, its runtime, its own kernels."""

"""What is particular to a kind of device: its facts, its runtime, and kernels that only it has."""

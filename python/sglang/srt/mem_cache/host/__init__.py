"""L2, host memory: pools by kind, layouts, memory, and copies between L1 and L2."""

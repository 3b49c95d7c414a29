"""L1, device memory: kinds of state, and the pools that hold them."""

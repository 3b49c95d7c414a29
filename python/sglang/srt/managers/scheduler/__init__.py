"""The scheduler process: what is computed next, and the books of every request."""

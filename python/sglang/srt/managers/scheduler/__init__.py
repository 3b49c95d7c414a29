"""The scheduler process, which decides which requests are computed next."""

"""The scheduler process: decides which requests are computed next, and which slots each holds."""

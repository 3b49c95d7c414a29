"""The scheduler process: decides which requests are computed next, and keeps their books."""

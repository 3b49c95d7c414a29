"""Tiny models and what is known of their outputs."""

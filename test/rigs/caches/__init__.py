"""Prefix caches with real pools and made-up state."""

"""Prefill and decode servers for tests."""

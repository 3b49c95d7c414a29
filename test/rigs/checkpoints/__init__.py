"""Checkpoints that nobody should publish."""

"""Weights from a running server: what a seed tells, and reading its memory."""

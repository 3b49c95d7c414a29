"""Layers by themselves, outside of a model."""

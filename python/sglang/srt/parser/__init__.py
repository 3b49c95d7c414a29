"""Parsers of a model's output that belong to no tool-call format."""

"""Parsers of a model's output other than those of tool calls."""

"""Parsers of the tool calls in a model's output, one for each format."""

"""Constrained outputs in tests: products of JSON schemas, and what their grammars allow."""

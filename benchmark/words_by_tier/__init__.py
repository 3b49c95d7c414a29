"""Equality of words and recall, cold and from every tier, with real servers."""

"""The prefix tree: keys, nodes, structure, books, eviction order, agreement of the ranks."""

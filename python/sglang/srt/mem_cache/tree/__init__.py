"""The prefix tree: keys, nodes, structure, books, eviction order, what the ranks agree on."""

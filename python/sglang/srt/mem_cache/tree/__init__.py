"""The prefix tree: keys, nodes, page ownership, eviction order, agreement of the ranks."""

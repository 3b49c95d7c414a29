"""CPU time of single parts: prefix tree, decode step, HTTP path, first token, unused tiers."""

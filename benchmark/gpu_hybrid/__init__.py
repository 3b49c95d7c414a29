"""Models with more state than KV on a GPU: steps, servers, experts."""

"""Random runs of tiny models that mix the engine's features, so that each pair of them meets."""

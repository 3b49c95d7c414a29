"""Loading a model's weights, and telling one set of weights from another."""

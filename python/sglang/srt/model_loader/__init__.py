"""Loading of a model's weights, and their identity."""

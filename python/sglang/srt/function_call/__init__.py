"""Tool calls in a model's output, by the format that the model writes."""

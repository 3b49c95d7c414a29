"""The forward pass of Qwen3-8B's shape on a GPU: steps, attention backends, kernels."""

"""What a request may ask of sampling: plain values, no tensors."""

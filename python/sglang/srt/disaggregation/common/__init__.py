"""What prefill and decode servers say to each other about a request."""

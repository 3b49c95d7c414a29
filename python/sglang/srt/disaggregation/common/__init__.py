"""What prefill and decode servers tell each other about a request, and the reads of its pages."""

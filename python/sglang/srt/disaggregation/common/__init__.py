"""Conversation of prefill and decode servers about a request, and the reads of its pages."""

"""Starts of a server with the weights of a running server."""

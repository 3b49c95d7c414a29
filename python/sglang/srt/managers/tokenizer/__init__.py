"""The server process's side of requests: bodies to tokens, and answers to waiting handlers."""

"""The side of the server process: bodies to tokens, and answers to those who wait."""

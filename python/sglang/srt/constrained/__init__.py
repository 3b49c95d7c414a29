"""Constrained decoding: grammars that mask, token by token, what a request may say next."""

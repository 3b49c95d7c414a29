"""Constrained decoding: grammars that mask the tokens which a request may not sample next."""

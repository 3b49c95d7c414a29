"""Speculative decoding: a layer of the checkpoint drafts tokens, and the model verifies them."""

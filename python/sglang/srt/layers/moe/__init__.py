"""Mixture of experts: who computes a token, the experts, and the block around them."""

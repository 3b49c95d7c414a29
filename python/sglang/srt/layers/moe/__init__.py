"""Mixture of experts: the choice of experts, the experts, and the block around them."""

"""Stores for L3, real and fake, and Transfer Engines."""

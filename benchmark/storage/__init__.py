"""Puts, gets and keys of the L3 backends, beside bare loops over the same interfaces."""

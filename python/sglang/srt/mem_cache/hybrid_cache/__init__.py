"""Groups of host pools for models with one or several kinds of state."""

"""Hit rates and times of the prefix cache by replay on the real tree; no model runs."""

"""The tiers below the tree: host memory and storage, joined to one prefix cache."""

"""Layers of multi-head latent attention (MLA), and the indexer of its sparse form."""

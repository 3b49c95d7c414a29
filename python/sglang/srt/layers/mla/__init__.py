"""Multi-head latent attention (MLA) as models have it, and the indexer of its sparse form."""

"""Draft layers (MTP) of tiny models: transformers' and the engine's, run by hand."""

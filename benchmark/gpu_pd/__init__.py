"""Prefill and decode on two GPUs over NVLink, and KV pages between them."""

"""Kinds of state that a model keeps: their names, and what a prefix needs of each. Plain data."""

from __future__ import annotations

from enum import StrEnum


class PoolName(StrEnum):
    """Kinds of state that a model keeps per token or per prefix; the pool part of object keys."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    """What a prefix needs of an extra pool to count as a hit."""

    ALL_PAGES = "all_pages"
    """A page for each KV page."""
    TRAILING_PAGES = "trailing_pages"
    """A state at the end of the prefix only."""

"""The kinds of attention; `attention/attention_registry.py` has their backends."""

from __future__ import annotations

from typing import Final, NewType

AttentionKind = NewType("AttentionKind", str)
"""Kind of an attention layer, by what it computes and caches. Decides which backends can run it."""

FULL_ATTENTION: Final = AttentionKind("full")
"""Every token sees all tokens up to itself; keys and values are kept per head."""

MLA: Final = AttentionKind("mla")
"""Like `FULL_ATTENTION`, but all heads share one latent row per token."""

DSA: Final = AttentionKind("dsa")
"""Like `MLA`, but a token sees only the tokens that an indexer chooses."""

POOLED_DSA: Final = AttentionKind("pooled_dsa")
"""Like `DSA`, but an indexer chooses groups of tokens; a token sees those of its open group too."""

COMPRESSED: Final = AttentionKind("compressed")
"""A token sees the last tokens, and rows that stand for groups of earlier ones; all heads share one
key of a token or group, which is its value too."""

SLIDING_WINDOW: Final = AttentionKind("sliding_window")
"""Like `FULL_ATTENTION`, but a token sees only the last tokens; their keys and values are a state
of the whole prefix."""

"""Digest of a tree, equal on all ranks while their trees are equal.

The digest is a sum over its nodes. Each change adds to the sum, so its cost does not grow with the
tree. A node is named by its tokens from the root on, never by its slots, which may differ between
ranks.

P(x) is a hash of the prefix that ends at x. A node from a to b that is in a tier of weight w adds
w * (P(b) - P(a)). Cut at m, its parts add w * (P(m) - P(a)) + w * (P(b) - P(m)), which is the same:
a split does not change the sum. A state after prefix x adds w * P(x), which a split does not change
either.

P is xxh3 of the prefix's tokens. Every node keeps the running state of that hash (700 bytes), so
that a node below it hashes no more than its own tokens.

Threads: the scheduler's only.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import xxhash

from sglang.srt.mem_cache.tree.radix_key import KeyArray

PrefixHash: TypeAlias = xxhash.xxh3_64
"""The hash of a prefix, which can be continued."""

MODULUS: Final = (1 << 61) - 1
"""Modulus of digests; a prime, so that no product of nonzero factors is 0."""
DEVICE_WEIGHT: Final = 0x15B0A1C8F3D27E49
HOST_WEIGHT: Final = 0x0D6E8FEB86659FD9
_STORAGE_WEIGHT: Final = 0x1C3A5C85C97CB312


def hash_of(name: str) -> int:
    """A 64-bit hash of `name`, the same in every process."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def storage_weight(epoch: int) -> int:
    """Weight of a node whose pages are in L3 since `epoch`; 0 for -1, a node that is not in L3."""
    return _STORAGE_WEIGHT * (epoch + 1)


class TreeDigest:
    """The digest of one tree. The root holds it, and the nodes keep it up to date."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def change(self, span: int, weight: int) -> None:
        """A node of `span` enters tiers of total weight `weight`; negative: it leaves them."""
        self.value = (self.value + span * weight) % MODULUS


def empty_prefix(extra_key: str | None) -> PrefixHash:
    """The empty prefix of prompts with `extra_key`."""
    return xxhash.xxh3_64(seed=0 if extra_key is None else hash_of(extra_key))


def prefix_with(before: PrefixHash, tokens: KeyArray) -> PrefixHash:
    """The prefix `before` continued with `tokens`; `before` itself does not change."""
    prefix = before.copy()
    prefix.update(tokens.data)
    return prefix


def span_of(begin: PrefixHash, end: PrefixHash) -> int:
    """Factor of a node that reaches from prefix `begin` to prefix `end`; below `MODULUS`."""
    return (end.intdigest() - begin.intdigest()) % MODULUS

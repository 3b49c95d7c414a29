"""Hashes of pages, eviction orders and memory pools, at SGLang's path and by its names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    init_mooncake_custom_mem_pool as maybe_init_custom_mem_pool,
)
from sglang.srt.mem_cache.evict_policy import get_eviction_strategy
from sglang.srt.mem_cache.tree.radix_key import (
    PageHash,
    RadixKey,
    hash_str_to_int64,
    page_hash,
    token_array,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tree_node import TreeNode

__all__ = [
    "compute_node_hash_values",
    "get_eviction_strategy",
    "get_hash_str",
    "hash_str_to_int64",
    "maybe_init_custom_mem_pool",
    "split_node_hash_value",
]


def get_hash_str(
    token_ids: Sequence[int] | Sequence[tuple[int, int]] | RadixKey, prior_hash: str | None = None
) -> str:
    """64 hex digits: sha256 of the hash before, and of the tokens as u32, little-endian.

    Args:
        token_ids: Tokens of a page, or its bigrams; an extra key is no part of the hash.
        prior_hash: Hash of the page before.

    Raises:
        OverflowError: A token id does not fit 32 bits.
        ValueError: `prior_hash` is not hexadecimal.
    """
    prior = None if prior_hash is None else PageHash(prior_hash)
    if isinstance(token_ids, RadixKey):
        return page_hash(token_ids.ids, prior)
    flat = chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in token_ids)
    return page_hash(token_array(list(flat)), prior)


def compute_node_hash_values(node: TreeNode, page_size: int) -> list[PageHash]:
    """Hash of each page of a node of a tree, chained from the root."""
    return node.page_hashes(page_size)


def split_node_hash_value(
    child_hash_value: list[PageHash] | None, split_len: int, page_size: int
) -> tuple[list[PageHash] | None, list[PageHash] | None]:
    """Hashes of a node that is split behind `split_len` tokens: of the upper and the lower part."""
    if child_hash_value is None:
        return None, None
    pages = split_len // page_size
    return child_hash_value[:pages], child_hash_value[pages:]

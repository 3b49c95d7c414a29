"""Types that the engine and every L3 storage backend share: outcomes, pools, results, settings.

Import them from `sglang.srt.mem_cache.hicache_storage`. Plain data, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import xxhash

if TYPE_CHECKING:
    import torch


class CacheOutcome(StrEnum):
    """The outcome of one page or one operation; also a label in metrics and a word in logs.

    Only LANDED is true in a condition, so that outcomes mix with the bools of third parties.
    """

    LANDED = "landed"
    """The bytes arrived and are verified. For a write: the object is in the store."""
    MISS = "miss"
    """Not in the store."""
    SHORT = "short"
    """Not usable or not tried, because an earlier page did not land."""
    DAMAGED = "damaged"
    """Truncated, altered, or the object of another key."""
    LATE = "late"
    """Did not arrive in time."""
    OVERTAKEN = "overtaken"
    """A read that was cancelled, because computing was faster or was going to be."""
    NO_STATE = "no_state"
    """Not read: the store has the pages, but no recurrent state that continues them."""
    REVOKED = "revoked"
    """Not read, because the hit is below the threshold."""
    UNAVAILABLE = "unavailable"
    """Not tried, because the store fails and is not used for a while."""
    FAILED = "failed"
    """Tried and failed: store full, read-only, transfer error."""

    def __bool__(self) -> bool:
        return self is CacheOutcome.LANDED


PageResult: TypeAlias = CacheOutcome | bool
"""Result of one page. Built-in backends return outcomes; third parties may return bools."""

PoolResults: TypeAlias = Mapping[str, Sequence[PageResult]]
"""Pool name to one result for each key, in the order of the transfer's keys."""


class StorageUnavailable(Exception):
    """The whole store failed, not just one page. The caller's circuit breaker counts these."""


class StorageUnreachable(StorageUnavailable):
    """The store did not answer during set-up. The message is one line with a remedy."""


@dataclass(slots=True)
class PoolTransferResult:
    """The hit length of a prefix. A report, not a lease: objects may vanish at any time."""

    kv_hit_pages: int
    """Pages of the longest prefix that every pool can serve."""
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)
    """Extra pool to pages of the longest prefix that it and the primary pool can serve."""
    primary_pages: int = 0
    """Pages of the longest prefix that the primary pool alone can serve; 0 also if unknown."""

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(kv_hit_pages=0)

    def update_kv_hit_pages(self, kv_hit_pages: int) -> None:
        """Shorten the hit to at most `kv_hit_pages`."""
        self.kv_hit_pages = min(self.kv_hit_pages, kv_hit_pages)

    def update_extra_pool_hit_pages(self, results: Mapping[str, int]) -> None:
        """Record the hits of extra pools, in pages."""
        self.extra_pool_hit_pages.update(results)


class StorageUsage(NamedTuple):
    """How full a whole store is, whoever filled it; None: unknown."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    num_objects: int | None = None
    num_evicted: int | None = None
    """Objects that the store evicted since its start."""
    num_other_namespaces: int | None = None
    """Namespaces with objects, except the one of the engine that asks."""
    nodes: tuple[str, ...] | None = None
    """Addresses of the nodes that lend memory."""
    unlike_nodes: tuple[str, ...] = ()
    """Nodes with another transport than this client's: `address (protocol)`."""


NOTE_BYTES: Final = 24
"""Length of a note (`HiCacheStorage.get_notes`)."""
FORMAT_VERSION: Final = 1
"""Increased when the bytes or the keys of objects change their meaning."""


_SHOWN_DIGITS: Final = 12


class CacheNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that engines must have in common to share pages. Its digest is the first part
    of every L3 key."""

    weights_identity: str
    """Digest of weights and configuration (model_loader/weight_files.py)."""
    kv_dtype: str
    page_size: int
    page_byte_order: str
    """`HostKVCache.page_byte_order` of the primary pool: layouts with equal bytes share pages."""
    extra_pools: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Name, dtype and shape of each pool beside the KV pool; unset where there is none, so that it
    is no part of the digest."""
    format_version: int = FORMAT_VERSION

    def digest(self) -> str:
        """32 hex digits."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))

    def described(self) -> dict[str, str]:
        """The properties for operators, who compare them between servers."""
        return {
            "weights": self.weights_identity[:_SHOWN_DIGITS],
            "kv_dtype": self.kv_dtype,
            "page_size": str(self.page_size),
            "byte_order": self.page_byte_order,
            "extra_pools": "; ".join(self.extra_pools or ()),
            "format_version": str(self.format_version),
        }


@dataclass(frozen=True, slots=True)
class HiCacheStorageConfig:
    """The properties of an engine that its backend needs."""

    tp_rank: int
    """Rank in the attention-TP group, which determines this process's share of the heads."""
    tp_size: int
    """Ranks that split the heads of attention."""
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    """Never part of a key, because context-parallel ranks have the same KV."""
    attn_cp_size: int
    is_mla_model: bool
    """True if all ranks have the same bytes in the primary pool."""
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    """An object holds the heads that one of this many ranks would have, for any `tp_size`; None:
    the heads of this rank."""
    should_split_heads: bool = False
    """True if this rank's heads are several objects. The first has the pool's name in the backend,
    and each other one is a pool there."""
    extra_config: dict[str, Any] | None = None
    namespace: str = field(default="", kw_only=True)
    """First part of every key: weights, KV dtype, page size, byte order, format version."""
    object_names: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Last part of the keys of a pool's objects (`kv/h0-3.8`: heads 0 to 3 of 8), by pool as the
    backend knows it. The engine names all pools. Objects of a pool that is not here are this
    rank's alone, or, if `is_mla_model`, shared by all ranks."""

    @property
    def verify_checksum(self) -> bool:
        """Write and verify checksums of pages. Raises ValueError if not a bool."""
        value = (self.extra_config or {}).get("verify_checksum", True)
        if not isinstance(value, bool):
            raise ValueError(f"extra config verify_checksum: true or false, not {value!r}")
        return value

    def object_key(self, key: str, pool: str) -> str:
        """`{key}/{pool}[/{heads}]`: the key of a page's object of one pool."""
        name = self.object_names.get(pool)
        if name is None:
            is_shared = self.is_mla_model or self.tp_size <= 1
            name = pool if is_shared else f"{pool}/{self.tp_rank}_{self.tp_size}"
        return f"{key}/{name}"


@dataclass(slots=True)
class HiCacheStorageExtraInfo:
    """Hints to a backend about one call."""

    prefix_keys: list[str] | None = None
    """Keys of the pages before the first one of the call, root first."""
    extra_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PrefetchTimeoutConfig:
    """Bound on a prefetch under the `timeout` policy, in seconds."""

    base: float = 2.0
    per_ki_token: float = 0.1
    """Seconds for each 1,024 tokens of the prefetch."""
    max: float = 30.0

    def seconds_for(self, num_tokens: int) -> float:
        """The bound for a prefetch of `num_tokens`."""
        return min(self.max, self.base + self.per_ki_token * num_tokens / 1024)


class PlainHostPool(Protocol):
    """The part of a host pool without which no backend can move its pages."""

    @property
    def page_size(self) -> int: ...
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]: ...


class StoragePool(PlainHostPool, Protocol):
    """The part of a host pool that backends use. `indices` are int64 CPU tensors of whole pages."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def is_zero_copy(self) -> bool: ...
    def check_pages(self, indices: torch.Tensor) -> None: ...
    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]: ...
    def get_page_views(self, indices: torch.Tensor) -> list[list[memoryview]]: ...
    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None: ...
    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None: ...
    def known_checksums(self, indices: torch.Tensor) -> list[bytes | None]: ...
    def keep_checksums(self, indices: torch.Tensor, known: Sequence[bytes | None]) -> None: ...

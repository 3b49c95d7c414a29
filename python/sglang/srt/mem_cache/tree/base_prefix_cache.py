"""Interfaces of prefix caches to the scheduler, and of requests to a cache.

The trees never import the scheduler's `Req`: they touch it through `CacheableRequest`, and the
type checker proves that `RequestSlots` fits. Counts are tokens; indices are token slots of a pool.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sglang.srt.mem_cache.tiers.hicache_administration import StorageAdministration
    from sglang.srt.mem_cache.tree.digest import Books
    from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey, TokenArray
    from sglang.srt.mem_cache.tree.state_metrics import StateMetrics
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


def not_supported(params: object, *names: str) -> ValueError:
    """The error for a field of `params` that belongs to a kind of state that a cache lacks."""
    given = ", ".join(f"{name}={getattr(params, name)!r}" for name in names)
    return ValueError(f"{type(params).__name__}: this cache keeps no state for {given}; leave out")


class CacheableRequest(Protocol):
    """The part of a request that a prefix cache reads and writes.

    The scheduler owns everything here but `last_node`, `prefix_indices` and
    `cache_protected_len`, which the cache rewrites in `cache_unfinished_req`.
    """

    req_pool_idx: int | None
    """Row of the `ReqToTokenPool` that holds the slots of this request."""
    prefix_indices: torch.Tensor
    """int64 `[n]` on the device: slots of the first n tokens, owned by the tree up to
    `cache_protected_len` and by the request from there on."""
    last_node: TreeNode
    """The node whose path this request holds a lock on."""
    cache_protected_len: int
    """Tokens at the front whose slots belong to the tree. Whole pages."""

    @property
    def rid(self) -> str: ...

    @property
    def extra_key(self) -> str | None:
        """Separates prefixes: equal tokens under different keys never share pages."""

    @property
    def priority(self) -> int: ...

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV has been computed and stored."""

    @property
    def kv_committed_ids(self) -> Sequence[int] | TokenArray:
        """These tokens in order: prompt, then output. Made anew each time."""


class RunningRequest(CacheableRequest, Protocol):
    """What `cow_mamba` asks of a request besides."""

    mamba_pool_idx: torch.Tensor | None
    """int64 `[1]` on the device: the slot that the request runs on, which never is the tree's."""


class StatefulRequest(CacheableRequest, Protocol):
    """What a cache of recurrent states reads and writes of a request besides."""

    mamba_track_slot: torch.Tensor | None
    """int64 `[1]` on the CPU: the slot of its newest snapshot, or of its next. The request's, until
    the tree takes it and leaves None."""
    mamba_last_track_seqlen: int | None
    """Tokens that the snapshot in `mamba_track_slot` stands for, at most `kv_committed_len`; None:
    it holds none that the tree has not been offered."""


@dataclasses.dataclass(slots=True)
class MatchPrefixParams:
    key: RadixKey
    cow_mamba: bool = False
    """Copy the state at the end of the match to `mamba_pool_idx` of `req`, unless it has to be
    loaded first (`mamba_host_hit_length`). The copy is queued on the current stream."""
    req: CacheableRequest | None = None


@dataclasses.dataclass(slots=True)
class InsertParams:
    key: RadixKey | None = None
    value: torch.Tensor | None = None
    mamba_value: torch.Tensor | None = None
    """int64 `[1]` on the CPU: the slot of the state behind `key`."""
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    chunked: bool = False
    priority: int = 0


@dataclasses.dataclass(slots=True)
class InsertResult:
    prefix_len: int
    """Tokens of the key that the tree already had on the device (whole pages)."""
    total_len: int = 0
    mamba_exist: bool = False
    """The tree had a state there on the device: `mamba_value` stays the caller's."""
    inserted_host_node: TreeNode | None = None


@dataclasses.dataclass(slots=True)
class EvictParams:
    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0
    """States on the device."""


@dataclasses.dataclass(slots=True)
class EvictResult:
    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0


@dataclasses.dataclass(slots=True)
class IncLockRefResult:
    delta: int | None = None


@dataclasses.dataclass(slots=True)
class DecLockRefResult:
    delta: int | None = None


@dataclasses.dataclass(slots=True)
class InitLoadBackParams:
    best_match_node: TreeNode
    host_hit_length: int
    mem_quota: int | None = None
    req: CacheableRequest | None = None


class MatchResult(NamedTuple):
    """How far each tier reaches into a key. Whole pages; each tier continues the one above."""

    device_indices: torch.Tensor
    """int64 `[n]` on the device: slots of the first n tokens."""
    last_device_node: TreeNode
    """The deepest matched node that is on the device: what to lock."""
    last_host_node: TreeNode
    """The deepest matched node of any tier: where an L3 prefetch continues."""
    best_match_node: TreeNode
    """The node to load back from: `last_host_node`, or the device node if nothing is on host."""
    host_hit_length: int = 0
    """Tokens after `device_indices` that are on the host only."""
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0
    """States to load: 1 where the one at the end is on the host alone, or is being loaded."""
    mamba_branching_seqlen: int | None = None
    """Where the pages reach further than the match: the last position among them at which a
    snapshot would have made the match longer."""
    cache_protected_len: int | None = None
    mamba_cut_length: int = 0
    """Tokens behind the match whose pages some tier has, but no state that continues them."""


class Workload(NamedTuple):
    """What a scheduler has yet to compute of prompts, in tokens."""

    computing: int
    """The device was given these, or they follow those in the prompt that is computed in parts."""
    waiting: Mapping[str, int]
    """Tokens of each prompt in the queue that no tier had when it came, by request."""


class BasePrefixCache(ABC):
    """A prefix cache as the scheduler sees it.

    All methods run on the scheduler thread. The defaults below are those of a cache of one tier.
    """

    page_size: int
    disable: bool
    """Nothing is kept across requests."""
    administration: StorageAdministration | None = None
    """Changes of L3 at run time; None: this cache has no tiers below L1."""
    state_metrics: StateMetrics | None = None
    """Counts what happens to recurrent states; None: the model has none."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. The allocator is cleared by the caller."""

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix of `params.key`, in whole pages. The one match function:
        scheduling, prefetch and load-back all use it.

        Where it is the whole key, the scheduler computes the key's last token again without
        storing anything. A cache of state that this would spoil, such as a recurrent one, leaves
        out the last page here.
        """

    @abstractmethod
    def cache_finished_req(self, req: CacheableRequest, is_insert: bool = True) -> None:
        """Take over what `req` computed (whole pages), free the rest of its slots, unlock."""

    @abstractmethod
    def cache_unfinished_req(self, req: CacheableRequest, chunked: bool = False) -> None:
        """Take over what `req` computed so far and let it go on: its row of the
        `ReqToTokenPool`, `prefix_indices`, `last_node` and `cache_protected_len` are updated.

        Args:
            chunked: More of its prompt follows. A tree that counts uses then counts none;
                `RadixCache` counts a request's use when it ends.
        """

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` device slots if unlocked pages allow it, and `mamba_num`
        states. A page that is useless without its state goes with it."""

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Keep `node` and its ancestors on the device until the matching `dec_lock_ref`."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> DecLockRefResult:
        """Undo one `inc_lock_ref`."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Device tokens in the tree that no lock protects."""

    @abstractmethod
    def protected_size(self) -> int:
        """Device tokens in the tree under a lock."""

    @abstractmethod
    def total_size(self) -> int:
        """Device tokens in the tree."""

    @abstractmethod
    def check_integrity(
        self,
        request_slots: Iterable[torch.Tensor] = (),
        request_states: Iterable[torch.Tensor] = (),
    ) -> None:
        """Assert every invariant of the books.

        Args:
            request_slots: For each request that holds slots, the int64 slots it owns itself
                (those after its `cache_protected_len`).
            request_states: For each request the int64 slots of states that it owns.

        Raises:
            AssertionError: Says which page of which tier has no owner, or two.
        """

    def supports_mamba(self) -> bool:
        """Whether the cache keeps recurrent states."""
        return False

    @property
    def mamba_snapshot_alignment(self) -> int | None:
        """Tokens: snapshots of recurrent states are taken at multiples of it; None: the cache keeps
        none."""
        return None

    def pin_state(self, node: TreeNode) -> int:
        """Keep the recurrent state at the end of `node`, whose pages are locked, on the device.

        Returns:
            Its slot, maybe still being loaded; 0, and nothing is pinned: there is none.
        """
        return 0

    def unpin_state(self, node: TreeNode) -> None:
        """Undo one `pin_state` that gave a slot."""

    def mamba_evictable_size(self) -> int:
        """States on the device that can be evicted."""
        return 0

    def mamba_slots(self) -> dict[str, int]:
        """Slots of recurrent states on the device: how many there are, and how many are free,
        evictable or used; empty where the model has none."""
        return {}

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """Reserve device slots for the host part of a match and queue its copy.

        Returns the slots that continue `device_indices` (int64, maybe empty: no room) and the
        node to lock instead of `last_device_node`.
        """
        raise NotImplementedError("this cache has no host tier")

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads as one operation. Returns the consumer index that the batch
        passes to the pool's layer counter, or -1 where there is nothing to wait for."""
        return -1

    def start_writing_host_cache(self) -> None:
        """Start the queued copies to the host, in order behind what the device has been given.
        Otherwise the next tick does."""

    def check_hicache_events(self) -> None:
        """One scheduler tick: act on finished copies and transfers, as the ranks agree on them.

        Raises:
            RanksDiverged: The books of the ranks differ.
        """

    @property
    def needs_tick(self) -> bool:
        """Whether the ranks have something to agree on at the next tick, even if nothing is busy.
        The same on all ranks."""
        return False

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | TokenArray,
        last_hash: PageHash | None = None,
        prefix_keys: list[PageHash] | None = None,
        *,
        extra_key: str | None = None,
        only_join: bool = False,
    ) -> None:
        """Start reading the pages after `last_host_node` from L3, in the background; those that
        are being read already are waited for, and with `only_join` no others."""

    def check_prefetch_progress(self, req_id: str) -> bool:
        """True when `req_id` need not wait for L3 any longer. Publishes what has landed; the rest
        is read on until `note_scheduled`."""
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Tokens that L3 contributed to `req_id`, once."""
        return 0

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds`: what a page that is not found costs."""

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        """`workload` tells what waits to be computed, as of now, whenever the cache has to know.
        It takes a moment for each request in the queue."""

    def watch_queues(self, queues: Books) -> None:
        """`queues` are compared between the ranks, together with the cache's own books."""

    def note_waiting(self, rid: str, arrival_number: int, node: TreeNode) -> None:
        """Request `rid` waits, and will use the prefix that ends with `node`: what the queue will
        use is evicted last. Requests are expected to be served in the order of their numbers."""

    def note_scheduled(self, rid: str) -> None:
        """Request `rid` has locked what it uses; it waits no more, and nothing is read for it."""

    def release_aborted_request(self, rid: str) -> None:
        """Forget that a request waits that will not run, and its prefetch."""

    @property
    def storage_backend_name(self) -> str | None:
        """Class name of the L3 backend, as `cached_tokens_details` shows it; None without one."""
        return None

    def tiers(self) -> list[str]:
        """One line per tier below L1: its size, and why that size."""
        return []

    def storage_state(self) -> dict[str, Any]:
        """L3's backend, its configuration without secrets, policies; empty without such a tier."""
        return {}

    def count_lookup(
        self, prompt_tokens: int, *, device: int, host: int, storage: int, cut: int = 0
    ) -> None:
        """Count for the metrics that a prompt was looked up, how many of its tokens each tier had
        that no tier above it had, and how many lacked a recurrent state alone (`cut`)."""

    def read_metrics(self) -> None:
        """Bring up to date the metrics that are set when they are read."""

    def is_busy(self) -> dict[str, int]:
        """Operations in flight by kind; empty when idle."""
        return {}

    def shutdown(self) -> None:
        """Stop the threads of this cache, within a bound."""

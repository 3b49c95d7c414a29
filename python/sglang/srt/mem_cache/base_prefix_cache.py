"""Parameters and results of the calls of prefix caches, and the parts of requests that they use.

The trees never import the scheduler's `Req`: they touch it through `CacheableRequest`, and the
type checker proves that `RequestSlots` fits. Counts are tokens; indices are token slots of a pool.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey, TokenArray
    from sglang.srt.mem_cache.tree.replicated_state import ReplicatedState
    from sglang.srt.mem_cache.tree.session_hints import Session
    from sglang.srt.mem_cache.tree.tenants import Evictor
    from sglang.srt.mem_cache.tree.tree_node import TreeNode
    from sglang.srt.messages.cache_report import CacheReport


class Lookup(NamedTuple):
    """The result of looking a prompt up when it was first scheduled. Counts are tokens."""

    key: RadixKey
    """The part of the prompt that was looked up."""
    prompt_tokens: int
    device: int
    """Tokens that L1 had."""
    host: int
    """Tokens that L2 had, and not L1."""
    storage: int
    """Tokens that L3 had, and neither L1 nor L2."""
    cut: int = 0
    """Tokens that lacked only a recurrent state."""


def not_supported(params: object, *names: str) -> ValueError:
    """The error for fields of `params` that belong to a kind of state that the cache lacks."""
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
        """Key that separates prefixes: equal tokens under different keys never share pages."""

    @property
    def priority(self) -> int: ...

    @property
    def session(self) -> Session | None:
        """The session that will come back to this request's prefix; None: none will."""

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV has been computed and stored."""

    @property
    def kv_committed_ids(self) -> Sequence[int] | TokenArray:
        """Ids of the committed tokens in order: prompt, then output. A new object at each call."""


class RunningRequest(CacheableRequest, Protocol):
    """A request that `cow_mamba` copies a state for."""

    mamba_pool_idx: torch.Tensor | None
    """int64 `[1]` on the device: slot of the request's running state, which the tree never owns."""


class StatefulRequest(CacheableRequest, Protocol):
    """The further parts of a request that a cache of recurrent states reads and writes."""

    mamba_track_slot: torch.Tensor | None
    """int64 `[1]` on the CPU: slot of its newest snapshot, or of its next. The request owns it
    until the tree takes it and sets None."""
    mamba_last_track_seqlen: int | None
    """Tokens before the snapshot in `mamba_track_slot`, at most `kv_committed_len`; None: there is
    no snapshot that the tree has not been offered."""


@dataclasses.dataclass(slots=True)
class MatchPrefixParams:
    key: RadixKey
    cow_mamba: bool = False
    """Copy the state at the end of the match to `mamba_pool_idx` of `req`, unless the
    state has to be loaded first (`mamba_host_hit_length`). The copy is queued on the current
    stream."""
    req: CacheableRequest | None = None
    needs_state: bool = True
    """False: another server gives the recurrent state of the whole key, so the pages before its
    last token are of use without a state."""


@dataclasses.dataclass(slots=True)
class InsertParams:
    key: RadixKey | None = None
    value: torch.Tensor | None = None
    mamba_value: torch.Tensor | None = None
    """int64 `[1]` on the CPU: slot of the state after `key`."""
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
    """True if the tree had a state there on the device; then the caller still owns
    `mamba_value`."""
    inserted_host_node: TreeNode | None = None


@dataclasses.dataclass(slots=True)
class EvictParams:
    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0
    """Number of states on the device."""
    by: Evictor | None = None
    """Who needs the tokens; None: the output of running requests."""


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
    """Tokens that may be loaded; None: any number."""
    req: CacheableRequest | None = None
    mamba_quota: int | None = None
    """States that may be loaded; None: any number."""
    needs_state: bool = True
    """See `MatchPrefixParams.needs_state`. False: no state is loaded."""
    report: CacheReport | None = None
    """Gets the time of the load; None: not wanted."""
    rest: int = 0
    """Tokens that the caller allocates next: an eviction for the load makes room for them too."""
    refusal: str | None = None
    """Set by the call: reason why less than the match was loaded (a `NoLoad`)."""


class MatchResult(NamedTuple):
    """The match of a key in each tier. Whole pages; each tier continues the one above."""

    device_indices: torch.Tensor
    """int64 `[n]` on the device: slots of the first n tokens."""
    last_device_node: TreeNode
    """The deepest matched node on the device: the node to lock."""
    last_host_node: TreeNode
    """The deepest matched node of any tier: an L3 prefetch continues after it."""
    best_match_node: TreeNode
    """The node to load back from: `last_host_node`, or the device node if nothing is on host."""
    host_hit_length: int = 0
    """Tokens after `device_indices` that are on the host only."""
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0
    """Number of states to load: 1 if the state at the end is only on the host, or is being
    loaded."""
    mamba_branching_seqlen: int | None = None
    """Last position at which a snapshot would have made the match longer, given the cached pages;
    None: there is none."""
    cache_protected_len: int | None = None
    mamba_cut_length: int = 0
    """Tokens after the match whose pages a tier has, but without a usable state."""


class Workload(NamedTuple):
    """The parts of prompts that a scheduler has yet to compute, in tokens."""

    computing: int
    """Tokens that are in flight, or that remain of the prompt that is computed in parts."""
    waiting: Mapping[str, int]
    """Tokens of each waiting prompt that neither L1 nor L2 had on its arrival, by request."""


class BasePrefixCache:
    """The scheduler's questions to the tiers below L1, with the answers of a cache that has none.

    All methods run on the scheduler thread. `RadixCache` has the others.
    """

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """Reserve device slots for the host part of a match and queue its copy.

        Returns the slots that continue `device_indices` (int64, maybe empty: no room) and the
        node to lock instead of `last_device_node`.
        """
        raise NotImplementedError("this cache has no host tier")

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads as one operation. Returns the consumer index that the batch passes
        to the pool's layer counter, or -1 if there is no load to wait for."""
        return -1

    def verify_load(self, index: int) -> None:
        """Wait until load `index` (a consumer index) has ended and its pages are compared with
        their checksums; pages that differ are condemned. Call it before results of a step that read
        these pages are used. A collective."""

    def watch_store(self) -> None:
        """Note now and then whether the nodes of L3 serve. Does not block."""

    def check_hicache_events(self) -> None:
        """Run one scheduler tick: act on finished copies and transfers, as the ranks agree on them.

        Raises:
            RanksDiverged: The states of the ranks differ.
        """

    @property
    def needs_tick(self) -> bool:
        """True if the ranks must sync at the next tick even if no operation is in flight. The same
        on all ranks."""
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
        report: CacheReport | None = None,
    ) -> None:
        """Start to read the pages after `last_host_node` from L3 in the background. Pages that are
        being read already are not read again, and with `only_join` no others are read. `report`
        gets what L3 has and why it brings no more, until the request is scheduled or aborted."""

    def check_prefetch_progress(self, req_id: str) -> bool:
        """True if `req_id` need not wait for L3 any longer. Then landed pages are published; the
        read of the others continues until `note_scheduled`."""
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Take the number of tokens that L3 contributed to `req_id`."""
        return 0

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        """Set the function that gives the present workload. Its cost grows with the number of
        requests in the queue."""

    def watch_queues(self, queues: ReplicatedState) -> None:
        """Set the queues that are compared between the ranks, together with the cache's own
        state."""

    def tiers(self) -> list[str]:
        """One line per tier below L1: its size, and the reason for the size."""
        return []

    def storage_state(self) -> dict[str, Any]:
        """Backend of L3, its configuration without secrets, and the policies; empty without an
        L3."""
        return {}

    def is_busy(self) -> dict[str, int]:
        """Operations in flight by kind; empty when idle."""
        return {}

    def shutdown(self) -> None:
        """Stop the threads of this cache, within a bound."""

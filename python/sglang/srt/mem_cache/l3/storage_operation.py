"""Operations on L3: the request, its progress and its outcome.

Each is a small state machine with one terminal state. The scheduler thread makes operations, a
transfer thread carries them out. The docstring of a field names the thread that writes it; the
other thread sees single assignments of ints and flags.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tick_sync import PrefetchProgress
from sglang.srt.mem_cache.tree.tree_node import NodeWrite, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.pool_tier import HostTier

_NO_PROGRESS: Final = PrefetchProgress()


class _Operation:
    """Base of a read and a write."""

    __slots__ = ()
    host_indices: torch.Tensor
    extra_transfers: Sequence[PoolTransfer]
    outcome: CacheOutcome | None

    @property
    def transfers(self) -> list[PoolTransfer]:
        """One transfer for each pool with slots of its own, the primary pool's first."""
        return [PoolTransfer(PoolName.KV, self.host_indices), *self.extra_transfers]

    @property
    def ended(self) -> bool:
        return self.outcome is not None


@dataclass(eq=False, slots=True)
class PrefetchOperation(_Operation):
    """A read of the pages of a prompt after those that L1 and L2 have or that other reads bring.

    It owns `host_indices` until they are published (pages that landed) or released (the others),
    and `states` until these are published or released. Other slots of `extra_transfers` stay the
    caller's.

    States that are read follow the last page that the store has of the prompt: such a read is of
    use when all of it has landed, and not before.
    """

    request_id: str
    """The request that began it; others may wait for it too."""
    key: RadixKey
    """The whole prompt up to the last page asked for. Publishing matches it again, so no node
    needs to be pinned, and splits and evictions meanwhile do no harm."""
    start: int
    """Tokens of `key` that were in L1 or L2 at the start, or are read before these."""
    host_indices: torch.Tensor
    """int64 `[len(key) - start]`: host slots of the pages asked for."""
    hashes: list[PageHash]
    """One for each page asked for."""
    prefix_hashes: list[PageHash]
    """Hashes of the pages before."""
    deadline: float
    """`time.monotonic()` seconds."""
    epoch: int
    """The store's epoch when the read began; in a later one its objects may be gone."""
    extra_transfers: Sequence[PoolTransfer] = ()
    """Host slots in other pools that have their own; see `StoredPools.objects`. Auxiliary pools
    come along by themselves."""
    states: Mapping[HostTier, torch.Tensor] = field(default_factory=dict)
    """Scheduler: int64 `[1]` each, the host slots of the states that `extra_transfers` names, while
    they are this operation's."""

    hit_pages: int = -1
    """Transfer thread: pages that the store reported to this rank; -1 while unknown."""
    handed_pages: int = 0
    """Transfer thread: pages that the store may write to, from the first on. Final once the read
    is terminated."""
    landed_pages: int = 0
    """Transfer thread: pages that can be used, from the first on: all their parts are there and
    verified, and a state follows the last where a pool has states."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all: from now on it does not touch `host_indices`."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Transfer thread: the store has answered for this prompt, or the operation has ended."""
    progress: PrefetchProgress = _NO_PROGRESS
    """Scheduler: progress that the ranks agreed on last."""
    needs: dict[str, int] = field(default_factory=dict)
    """Scheduler: by waiting request, how many of the pages it needs, counted from the first."""
    wanted_pages: int = field(init=False)
    """Scheduler: the most of `needs`. It is only ever lowered."""
    is_terminated: bool = False
    """Scheduler: no request waits for more pages. The transfer stops at its next step."""
    is_cancelled: bool = False
    """Scheduler, before `is_terminated`: computing the prompt ended sooner, or was going to."""
    is_probe: bool = False
    """Scheduler: the read is never cancelled, because it measures how fast reads are."""
    has_states: bool = field(init=False)
    """True if states are read with the pages."""
    _owned: list[tuple[int, int]] = field(init=False)
    """Scheduler: ranges of `host_indices` that are neither the tree's nor free."""

    def __post_init__(self) -> None:
        self._owned = [(0, len(self.host_indices))]
        self.wanted_pages = len(self.hashes)
        self.has_states = bool(self.states)

    # ---- scheduler thread --------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """True if the read may bring more pages."""
        return not (self.progress.ended or self.is_cancelled)

    @property
    def reach(self) -> int:
        """Pages that have landed or may still land, as far as the store has answered."""
        if not self.is_reading:
            return self.progress.landed
        hit = self.progress.hit
        return self.wanted_pages if hit < 0 else min(self.wanted_pages, hit)

    @property
    def owned_tokens(self) -> int:
        """Host tokens that are still this operation's."""
        return sum(end - begin for begin, end in self._owned)

    def owns(self, begin: int, end: int) -> bool:
        """True if all tokens from `begin` to `end` are still this operation's."""
        return any(first <= begin and end <= last for first, last in self._owned)

    def owned_slots(self) -> torch.Tensor:
        """Host slots of the tokens that are still this operation's."""
        return self._slots(self._owned)

    def publish(self, begin: int, end: int) -> torch.Tensor:
        """Hand the tokens from `begin` to `end` to the tree; returns their host slots."""
        self._owned = _outside(self._owned, begin, end)
        return self.host_indices[begin:end].clone()

    def take_states(self) -> Mapping[HostTier, torch.Tensor]:
        """Hand over the slots of the states that are still this operation's."""
        states, self.states = self.states, {}
        return states

    def release(self, begin: int, end: int) -> torch.Tensor:
        """Give up all but the tokens from `begin` to `end`; returns the host slots."""
        freed = _outside(self._owned, begin, end) if begin < end else self._owned
        inside = [(max(first, begin), min(last, end)) for first, last in self._owned]
        self._owned = [(first, last) for first, last in inside if first < last]
        return self._slots(freed)

    def _slots(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        parts = [self.host_indices[begin:end] for begin, end in ranges]
        return parts[0] if len(parts) == 1 else torch.cat([self.host_indices[:0], *parts])

    def cancel(self) -> None:
        """End the read, because computing the prompt is going to end sooner."""
        self.is_cancelled = True
        self.is_terminated = True

    # ---- transfer thread ---------------------------------------------------------------------

    @property
    def outcome_now(self) -> CacheOutcome:
        """The outcome of a read that ends now. LATE if it was terminated before all awaited pages
        that the store has had landed."""
        if self.is_cancelled:
            return CacheOutcome.OVERTAKEN
        agreed = self.progress.hit
        hit = self.hit_pages if agreed < 0 else agreed
        awaited = self.wanted_pages if hit < 0 else min(self.wanted_pages, hit)
        is_late = self.is_terminated and self.landed_pages < awaited
        return CacheOutcome.LATE if is_late else CacheOutcome.LANDED

    def hand_over(self, pages: int) -> bool:
        """True if the store may write to the first `pages` pages. Call it before it does.

        False if no request waits for more than the store has been given already, or if another rank
        lacks the pages that follow. This thread writes the number and then reads `is_terminated`;
        the scheduler writes `is_terminated` and then reads the number. So one of them sees what the
        other has written.
        """
        hit = self.progress.hit
        if self.handed_pages >= (self.wanted_pages if hit < 0 else min(self.wanted_pages, hit)):
            return False
        self.handed_pages = pages
        return not self.is_terminated

    def finish(self, outcome: CacheOutcome) -> None:
        """End the operation."""
        self.outcome = outcome
        self.answered.set()


@dataclass(eq=False, slots=True)
class StorageOperation(_Operation, NodeWrite):
    """A write of a node's pages to L3. The node's host pages are pinned until it has ended."""

    node: TreeNode
    """The node; after a split the lower part, whose ancestors are the upper parts."""
    host_indices: torch.Tensor
    """int64 `[n]`: host slots."""
    hashes: list[PageHash]
    prefix_hashes: list[PageHash]
    after: StorageOperation | None
    """The write of the pages before these. If it fails, this one does: writes are prefix-closed."""
    epoch: int
    """The store's epoch when the write was queued."""
    extra_transfers: Sequence[PoolTransfer] = ()
    """Host slots in other pools that have their own, pinned as well; see `StoredPools.objects`."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all."""

    @property
    def lacks_predecessor(self) -> bool:
        """True if the store lacks the pages before these, so that no reader could use these."""
        return self.after is not None and self.after.outcome is not CacheOutcome.LANDED

    def finish(self, outcome: CacheOutcome) -> None:
        """Transfer thread: end the operation, and drop its reference to earlier ones."""
        self.after = None
        self.outcome = outcome


@dataclass(eq=False, slots=True)
class CheckOperation:
    """A question whether L3 still has all pages of a prompt that was written to it."""

    hashes: list[PageHash]
    """Hashes of pages, from the first page of the prompt on."""
    epoch: int
    """The store's epoch when the question was queued."""
    outcome: CacheOutcome | None = None
    """Transfer thread: MISS where a page has gone; LANDED otherwise, also without an answer."""


def _outside(ranges: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """`ranges` without what lies from `begin` to `end`."""
    parts = [
        part
        for first, last in ranges
        for part in ((first, min(last, begin)), (max(first, end), last))
    ]
    return [(first, last) for first, last in parts if first < last]

"""Operations on L3: what is asked, how far it came, how it ended.

Each is a small state machine with one terminal state. The scheduler thread makes and decides
them; one transfer thread works on them. Fields say who writes them; a reader in the other thread
sees single assignments of ints and flags.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode


@dataclass(eq=False, slots=True)
class PrefetchOperation:
    """Read the pages of a prompt that follow what L1 and L2 have of it, or what other reads bring.

    Owns `host_indices` until they are published (what landed) or released (the rest).
    """

    request_id: str
    """Who began it; others may wait for it too."""
    key: RadixKey
    """The whole prompt up to the last page asked for. Publishing matches it again, so no node
    needs to be pinned, and splits and evictions meanwhile do no harm."""
    start: int
    """Tokens of `key` that were in L1 or L2 at the start, or are read before these."""
    host_indices: torch.Tensor
    """int64 `[len(key) - start]`: host slots of the pages asked for."""
    hashes: list[PageHash]
    """One a page asked for."""
    prefix_hashes: list[PageHash]
    """Of the pages before."""
    deadline: float
    """`time.monotonic()` seconds."""
    epoch: int
    """Of the store when the read began: what it held may be gone in a later one."""

    hit_pages: int = -1
    """Transfer thread: what the store reported to this rank; -1 while unknown."""
    handed_pages: int = 0
    """Transfer thread: pages that the store was given to write to, from the first on. Final once
    the read is cut."""
    landed_pages: int = 0
    """Transfer thread: pages got and verified, from the first on."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all: from now on it does not touch `host_indices`."""
    agreed_hit: int | None = None
    """Scheduler: what the store has of it for all ranks; None while unknown."""
    wanted_pages: int = field(init=False)
    """Scheduler: somebody waits for these, from the first on. Only ever lowered."""
    is_terminated: bool = False
    """Scheduler: nobody waits for the rest. The transfer stops at its next step."""
    is_overtaken: bool = False
    """Scheduler, before `is_terminated`: that is because computing was going to be sooner, or
    was."""
    is_spared: bool = False
    """Scheduler: not to be overtaken, so that it shows how fast reads are."""
    _answered: threading.Event = field(default_factory=threading.Event)
    _owned: list[tuple[int, int]] = field(init=False)
    """Scheduler: ranges of `host_indices` that are neither the tree's nor free."""

    def __post_init__(self) -> None:
        self._owned = [(0, len(self.host_indices))]
        self.wanted_pages = len(self.hashes)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    @property
    def owned_tokens(self) -> int:
        """Scheduler: host tokens that are still this operation's."""
        return sum(end - begin for begin, end in self._owned)

    def owns(self, begin: int, end: int) -> bool:
        """Scheduler: whether all tokens from `begin` to `end` are still this operation's."""
        return any(first <= begin and end <= last for first, last in self._owned)

    def owned_slots(self) -> torch.Tensor:
        """Scheduler: those."""
        return self._slots(self._owned)

    def publish(self, begin: int, end: int) -> torch.Tensor:
        """Scheduler: hand the tokens from `begin` to `end` over; their host slots."""
        self._owned = _outside(self._owned, begin, end)
        return self.host_indices[begin:end].clone()

    def release(self, begin: int, end: int) -> torch.Tensor:
        """Scheduler: let go of all but the tokens from `begin` to `end`; the host slots."""
        freed, kept = self._owned, []
        if begin < end:
            freed = _outside(freed, begin, end)
            kept = [
                (max(first, begin), min(last, end))
                for first, last in self._owned
                if first < end and last > begin
            ]
        self._owned = kept
        return self._slots(freed)

    def _slots(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        if ranges == [(0, len(self.host_indices))]:
            return self.host_indices
        parts = [self.host_indices[begin:end] for begin, end in ranges]
        return parts[0] if len(parts) == 1 else torch.cat([self.host_indices[:0], *parts])

    def overtake(self) -> None:
        """Scheduler: cut it, because computing the prompt is going to be sooner."""
        self.is_overtaken = True
        self.is_terminated = True

    @property
    def why_cut(self) -> CacheOutcome:
        """How it ends before all pages that the store has are read."""
        if self.is_overtaken:
            return CacheOutcome.OVERTAKEN
        return CacheOutcome.LATE if self.is_terminated else CacheOutcome.LANDED

    def hand_over(self, pages: int) -> bool:
        """Transfer thread, before the store may write to the pages before `pages`: whether it may.

        Not where nobody waits for more than it was given, or another rank lacks what follows.
        Here the number is written before `is_terminated` is read, in the scheduler it is the other
        way round: either the thread sees that it is too late, or the scheduler sees the number.
        """
        hit = self.agreed_hit
        if self.handed_pages >= (self.wanted_pages if hit is None else min(self.wanted_pages, hit)):
            return False
        self.handed_pages = pages
        return not self.is_terminated

    def note_answer(self) -> None:
        """Transfer thread: the store has said what it has, and that is going to be read."""
        self._answered.set()

    def finish(self, outcome: CacheOutcome) -> None:
        """Transfer thread: settle."""
        self.outcome = outcome
        self._answered.set()

    def wait_for_answer(self, until: float) -> None:
        """Scheduler: wait until it is known what will be read, or `until` (`time.monotonic()`)."""
        self._answered.wait(max(0.0, until - time.monotonic()))


@dataclass(eq=False, slots=True)
class StorageOperation:
    """Write the pages of a node to L3. The node's host pages are pinned until it is settled."""

    node: TreeNode
    """The lower end: where the node was split meanwhile, its upper parts are ancestors."""
    host_indices: torch.Tensor
    """int64 `[n]`: host slots."""
    hashes: list[PageHash]
    prefix_hashes: list[PageHash]
    after: StorageOperation | None
    """The write of the pages before these; writes are prefix-closed, so its failure is ours."""
    epoch: int
    """Of the store when the write was queued."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all."""

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def finish(self, outcome: CacheOutcome) -> None:
        """Transfer thread: settle, and drop the chain to operations long past."""
        self.after = None
        self.outcome = outcome


@dataclass(eq=False, slots=True)
class CheckOperation:
    """Ask whether L3 still has the pages of a prompt, all of which it has had."""

    hashes: list[PageHash]
    """From the first page of the prompt on."""
    epoch: int
    """Of the store when this was queued."""
    outcome: CacheOutcome | None = None
    """Transfer thread: MISS where a page has gone, else LANDED, also where nobody was asked."""


def _outside(ranges: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """What of `ranges` is not from `begin` to `end`."""
    parts = [
        part
        for first, last in ranges
        for part in ((first, min(last, begin)), (max(first, end), last))
    ]
    return [(first, last) for first, last in parts if first < last]

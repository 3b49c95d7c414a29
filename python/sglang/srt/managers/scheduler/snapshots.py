"""Recurrent states around a step: the state that a request starts from, and its snapshots.

A request never runs on a state of the tree. Its first step reads the state at the end of its
cached prefix and writes a slot of its own. Steps leave snapshots in spare slots, at positions that
are chosen before the launch. The tree cannot use the running state itself: steps overlap, so it may
be a token too far by the time the CPU knows that its request has ended. The tree takes over a
snapshot together with the pages before it.

Running states come first. If no slot is free for a request that is about to start, a decoding
request gives up a snapshot that saves a page at most; if none has one, the tree evicts its oldest;
if it has none, a decoding request gives up any slot for snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.scheduler.policy import states_to_load
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.requests.req import Req, RequestSlots
    from sglang.srt.mem_cache.device.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Spare:
    """A slot that a request holds beyond its running state: it has a snapshot or is kept free for
    one."""

    arrival_number: int
    """Arrival number of the request."""
    saved_tokens: int
    """Tokens that later prompts need not compute thanks to the snapshot; 0: it has none, or a later
    one replaces it."""
    slots: RequestSlots
    is_next: bool
    """True if the slot is `snapshot_slot`, and not `mamba_track_slot`."""


def first_to_give_up(spares: Sequence[Spare]) -> Spare:
    """The slot to give to a request without a running state: the one whose loss costs least. Among
    equals, the newest request's."""
    return min(spares, key=lambda spare: (spare.saved_tokens, -spare.arrival_number))


class Snapshots:
    """Snapshots of the requests of one scheduler, whose tree keeps states of the pool. Scheduler
    thread only.

    The tree takes over snapshots, and evicts its oldest if slots are short. `interval` is the
    number of tokens between the snapshots of a request that decodes; 0: it leaves none.

    Raises:
        ValueError: The interval is no multiple of the distance between possible snapshots.
    """

    def __init__(self, tree: RadixCache, pool: StatePool, interval: int) -> None:
        assert tree.mamba_snapshot_alignment is not None, "the tree keeps states"
        self._tree = tree
        self._alignment = tree.mamba_snapshot_alignment
        self._pool = pool
        self._interval = interval
        if interval % self._alignment:
            raise ValueError(
                f"--mamba-track-interval {interval} must be a multiple of {self._alignment} "
                "tokens: snapshots end with a page and with a chunk of the kernel"
            )

    def make_room(self, decoding: Iterable[Req]) -> None:
        """Free a slot, if none is free, for a request that is about to start. One of the requests
        that decode may lose its snapshot, or the slot for its next one: before the tree loses a
        state if that costs later prompts a page at most."""
        if self._pool.available_size():
            return
        # A state of the tree saves whole prefixes, and any request may hit it now.
        self._give_up_spare(decoding, most_saved=self._alignment)
        self._evict()
        if not self._pool.available_size():
            self._give_up_spare(decoding)

    def has_room(self, decoding: Iterable[Req]) -> bool:
        """True if a slot is free, or `make_room` may free one."""
        if self._pool.available_size():
            return True
        return bool(self._tree.mamba_evictable_size() or _spares_of(decoding))

    def room_to_load(self, decoding: Iterable[Req]) -> int:
        """Number of states that may be loaded for a request that is about to start; frees a slot
        for one as `make_room` does if the tree has none to evict."""
        free, evictable = self._pool.available_size(), self._tree.mamba_evictable_size()
        quota = states_to_load(free, evictable, len(_spares_of(decoding)))
        if quota and not free + evictable:
            self._give_up_spare(decoding)
        return quota

    def _evict(self) -> None:
        if not self._pool.available_size():
            self._tree.evict(EvictParams(mamba_num=1))

    def _give_up_spare(self, decoding: Iterable[Req], most_saved: int | None = None) -> None:
        """Free a slot that one of `decoding` holds beyond its running state, if any does; one that
        saves later prompts at most `most_saved` tokens, if given. A write by a step in flight is
        harmless: it is queued before every later use of the slot."""
        spares = _spares_of(decoding)
        if not spares:
            return
        spare = first_to_give_up(spares)
        if most_saved is not None and spare.saved_tokens > most_saved:
            return
        slots = spare.slots
        if spare.is_next:
            slot, slots.snapshot_slot, slots.snapshot_in_flight = slots.snapshot_slot, None, None
        else:
            slot, slots.mamba_track_slot = slots.mamba_track_slot, None
            slots.mamba_last_track_seqlen = None
        assert slot is not None, "a spare is a slot of the pool"
        self._pool.free(slot)

    def shorten(self, extend_len: int, begin: int, branching: int | None) -> int:
        """Tokens of the `extend_len` after `begin` that the first step of a prompt computes. It
        ends where other prompts have diverged from this one (`branching`; None: nowhere), so that
        it leaves a snapshot there for later prompts."""
        if branching is None or not begin < branching < begin + extend_len:
            return extend_len
        return branching - begin

    def in_prefill(self, req: Req, extend_len: int) -> tuple[int, int, int]:
        """Slots for the snapshots of a prefill; 0: none is taken.

        Returns:
            A slot, and the number of the prefill's tokens before this snapshot; and, if one is
            free, a slot for the state behind them all: prompts that go on where this one ends
            start from there.
        """
        if req.is_probe:
            return 0, 0, 0
        begin, slots = req.progress.kv_committed_len, req.slots
        # A recurrent state after the last token of a prompt is of no use to the same prompt.
        is_last = extend_len == req.progress.uncommitted_tokens
        left = is_last and not self._pool.spec.is_repeatable
        end = (begin + extend_len - left) // self._alignment * self._alignment
        slot = 0
        if end > max(begin, slots.cache_protected_len):
            if slots.mamba_track_slot is None:
                slots.mamba_track_slot = self._take()
            self._count("prefill", slots.mamba_track_slot)
            slot = 0 if slots.mamba_track_slot is None else int(slots.mamba_track_slot)
        end_slot = 0
        if left and (begin + extend_len) % self._alignment == 0:
            # It saves later prompts a page at most: no snapshot of another prefix is evicted.
            (end_slot,) = self._pool.take(1) or (0,)
        if end_slot:
            slots.snapshot_slot = torch.tensor([end_slot])
            slots.snapshot_in_flight = begin + extend_len
        return slot, end - begin if slot else 0, end_slot

    def in_decoding(
        self, reqs: Sequence[Req], seq_lens: Sequence[int], width: int = 1
    ) -> tuple[list[int], list[int]] | None:
        """Choose the requests that leave a snapshot of a decode step, which is going to be
        launched.

        If a verification is in flight, a request may be earlier than assumed. Then more positions
        are possible, and the device decides whether this step takes the snapshot.

        Args:
            seq_lens: Context lengths, the tokens of this step included, as if all tokens in flight
                were accepted.
            width: Tokens of each request in this step.

        Returns:
            For each request the slot of its snapshot (0: it leaves none), and after how many of its
            tokens in this step it is taken; None: no request leaves one. The number is at most 0 if
            the snapshot is taken only if the request is earlier.
        """
        if not self._interval:
            return None
        taken = {
            row: (slot, width - after)
            for row, (req, length) in enumerate(zip(reqs, seq_lens, strict=True))
            if (after := length % self._interval) < width + max(0, req.progress.num_in_flight - 1)
            and (slot := self._track(req, length - after, is_reached=after >= width))
        }
        if not taken:
            return None
        by_row = [taken.get(row, (0, 0)) for row in range(len(reqs))]
        return [slot for slot, _ in by_row], [count for _, count in by_row]

    def on_counted(self, req: Req) -> None:
        """The tokens of a step of `req` are counted: of a decode step that has ended, or of a
        prefill that is launched, whose tokens the tree has. If the step left a snapshot behind
        them, it replaces the one before, whose slot is free again: the next is taken when it is
        due. The tree gets only the last one, when the request ends: earlier ones would displace
        states of other prefixes."""
        slots = req.slots
        if slots.snapshot_in_flight == req.progress.kv_committed_len:
            last = slots.snapshot_slot
            slots.snapshot_slot, slots.mamba_track_slot = slots.mamba_track_slot, last
            slots.mamba_last_track_seqlen = slots.snapshot_in_flight
            self.release(req)

    def release(self, req: Req) -> None:
        """Free the slot that `req` has for its next snapshot, which no step leaves any more. A
        write in flight is safe: it was queued before every later use of the slot."""
        slots = req.slots
        slot, slots.snapshot_slot, slots.snapshot_in_flight = slots.snapshot_slot, None, None
        if slot is not None:
            self._pool.free(slot)

    def _track(self, req: Req, length: int, *, is_reached: bool) -> int:
        """The slot for a snapshot of `req` behind `length` tokens; 0: there is none.

        `is_reached`: whether the step in flight may accept these tokens. If it leaves no snapshot
        there, nothing tells the one of this step from it.
        """
        slots = req.slots
        if req.is_probe or (is_reached and slots.snapshot_in_flight != length):
            return 0
        if slots.snapshot_slot is None:
            slots.snapshot_slot = self._take()
        self._count("decode", slots.snapshot_slot)
        if slots.snapshot_slot is None:
            return 0
        slots.snapshot_in_flight = length
        return int(slots.snapshot_slot)

    def _count(self, step: str, slot: torch.Tensor | None) -> None:
        metrics = self._tree.state_metrics
        assert metrics is not None, "the tree keeps states"
        metrics.snapshots.labels(step, "no_slot" if slot is None else "taken").inc()

    def _take(self) -> torch.Tensor | None:
        """A slot, int64 `[1]` on the CPU; None: there is no room."""
        self._evict()
        taken = self._pool.take(1)
        return None if taken is None else torch.tensor(taken)


def _spares_of(decoding: Iterable[Req]) -> list[Spare]:
    """The slots that requests hold beyond their running states."""
    spares = []
    for req in decoding:
        slots, known = req.slots, req.slots.cache_protected_len
        coming, last = slots.snapshot_in_flight, slots.mamba_last_track_seqlen
        if slots.snapshot_slot is not None:
            saved = 0 if coming is None else coming - known
            spares.append(Spare(req.arrival_number, saved, slots, is_next=True))
        if slots.mamba_track_slot is not None:
            saved = 0 if last is None or coming is not None else last - known
            spares.append(Spare(req.arrival_number, saved, slots, is_next=False))
    return spares

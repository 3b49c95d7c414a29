"""Recurrent states around a step: where a request starts, and where it leaves a snapshot.

A request never runs on a state of the tree. Its first step reads the state at the end of its
cached prefix and writes a slot of its own. Steps leave snapshots in spare slots, at positions that
are known before they are launched, since steps overlap: a running state may be a token too far by
the time the CPU knows that its request has ended. The tree takes a snapshot over together with the
pages before it.

For a model without recurrent states nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.tree.base_prefix_cache import EvictParams

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.mem_cache.device.state_pool import StatePool
    from sglang.srt.mem_cache.tree.base_prefix_cache import BasePrefixCache, StatefulRequest


class Snapshots:
    """Snapshots of the requests of one scheduler. Scheduler thread only.

    Args:
        tree: Takes snapshots over, and gives its oldest up where slots are short.
        pool: Where recurrent states are, if the tree keeps some; None: the model has none.
        interval: Tokens between the snapshots of a request that decodes; 0: none then.

    Raises:
        ValueError: The interval is no multiple of the distance between possible snapshots.
    """

    def __init__(self, tree: BasePrefixCache, pool: StatePool | None, interval: int) -> None:
        self._tree = tree
        self._alignment = tree.mamba_snapshot_alignment
        self._pool = None if self._alignment is None else pool
        self._interval = interval
        if self._alignment is not None and interval % self._alignment:
            raise ValueError(
                f"--mamba-track-interval {interval} must be a multiple of {self._alignment} "
                "tokens: snapshots end with a page and with a chunk of the kernel"
            )

    def make_room(self) -> None:
        """A request is about to need a state to run on: if none is free, the tree gives one up."""
        if self._pool is not None and not self._pool.available_size():
            self._tree.evict(EvictParams(mamba_num=1))

    def shorten(self, extend_len: int, begin: int, branching: int | None) -> int:
        """How many tokens the first step of a prompt computes.

        It ends where others have diverged from what is known of the prompt, so that it leaves a
        snapshot there for those who come next.

        Args:
            extend_len: How many it would compute.
            begin: Tokens before them.
            branching: Tokens before that place; None: there is none.
        """
        if branching is None or not begin < branching < begin + extend_len:
            return extend_len
        return branching - begin

    def in_prefill(self, req: Req, extend_len: int) -> tuple[int, int]:
        """The slot that takes a snapshot of a prefill, and after how many of its tokens; (0, 0):
        it leaves none."""
        if self._alignment is None or req.spec.is_probe:
            return 0, 0
        begin = req.progress.kv_committed_len
        # Behind the last token of a prompt, a state is of no use to the same prompt.
        is_last = extend_len == req.progress.uncommitted_tokens
        end = (begin + extend_len - is_last) // self._alignment * self._alignment
        if end <= begin:
            return 0, 0
        slots: StatefulRequest = req.slots
        if slots.mamba_track_slot is None:
            slots.mamba_track_slot = self._take()
        self._count("prefill", slots.mamba_track_slot)
        if slots.mamba_track_slot is None:
            return 0, 0
        return int(slots.mamba_track_slot), end - begin

    def in_decoding(
        self, reqs: Sequence[Req], seq_lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which requests leave a snapshot of a decode step, which is going to be launched.

        Args:
            reqs: Row by row.
            seq_lens: Their context lengths, the token of this step included.

        Returns:
            Their rows in the batch, int64 `[n]`, and the slots that take the snapshots, likewise,
            on the device; None: no request leaves one.
        """
        if self._alignment is None or not self._interval:
            return None
        taken = {
            row: slot
            for row, (req, length) in enumerate(zip(reqs, seq_lens, strict=True))
            if not length % self._interval and (slot := self._track(req, length))
        }
        if not taken:
            return None
        assert self._pool is not None
        device = self._pool.device
        rows = on_device(list(taken), device, torch.int64)
        return rows, on_device(list(taken.values()), device, torch.int64)

    def on_decoded(self, req: Req) -> None:
        """A decode step of `req` has ended, its token counted: the snapshot that it left, if any,
        takes the place of the one before. The tree gets the last when the request ends: earlier
        ones would only cost others theirs."""
        slots = req.slots
        if slots.snapshot_in_flight == req.progress.kv_committed_len:
            last = slots.snapshot_slot
            slots.snapshot_slot, slots.mamba_track_slot = slots.mamba_track_slot, last
            slots.mamba_last_track_seqlen = slots.snapshot_in_flight
            slots.snapshot_in_flight = None

    def release(self, req: Req) -> None:
        """Free the slot that `req` has for its next snapshot. What still writes to it was queued
        before whatever uses it next."""
        slot, req.slots.snapshot_slot = req.slots.snapshot_slot, None
        if slot is not None:
            assert self._pool is not None, "the pool alone hands out such slots"
            self._pool.free(slot)

    def _track(self, req: Req, length: int) -> int:
        slots = req.slots
        if req.spec.is_probe:
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
        assert self._pool is not None, "the tree keeps states of this pool"
        self.make_room()
        taken = self._pool.take(1)
        return None if taken is None else torch.tensor(taken)

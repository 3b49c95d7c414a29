"""Reads a prompt from all prefill ranks with a shard of it, in threads of its own."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import KVTransferMetric
from sglang.srt.disaggregation.base.first_token import FirstToken
from sglang.srt.disaggregation.common.control_connection import (
    Cancellation,
    RoomFailed,
    cannot_serve,
)
from sglang.srt.disaggregation.common.geometry import CannotServe, ShardSlice
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.page_reader import OwnSlots, Source
from sglang.srt.disaggregation.common.protocol import KVLayout
from sglang.srt.disaggregation.common.rank_map import RankPlace
from sglang.srt.disaggregation.common.shard_receiver import ShardReceiver
from sglang.srt.disaggregation.common.transfer_context import TransferContext

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
"""Seconds within which a shard that waits for the layouts of others notices that it waits in
vain."""


class Receiver(Protocol):
    """The request whose prompt is read; see `MooncakeKVReceiver`."""

    @property
    def bootstrap_addr(self) -> tuple[str, int]: ...
    @property
    def bootstrap_room(self) -> int: ...
    @property
    def sources(self) -> Sequence[Route]: ...
    @property
    def cancelled(self) -> Cancellation: ...
    def come(self, metadata: FirstToken) -> None: ...
    def fail(self, why: str) -> None: ...


class PromptRead:
    """The read of a prompt. One thread calls `run` and reads the first shard; threads
    `disagg-shard` read the others. Any thread may call the rest.

    Once all ranks have said what they hold, it is settled what each of them gives. A failed shard
    ends the others.

    Args:
        receiver: The request; it is told the outcome.
        own: Place of the prompt in this server's pools.
        context: What all receivers of this rank share.
        reader: Id drawn for this prompt, the same on all ranks of this server.
        fails_at: Step of `STEPS` that fails, for tests.

    Attributes:
        has_returned: Set when `run` has returned, or will never be called.
    """

    def __init__(
        self,
        receiver: Receiver,
        own: OwnSlots,
        context: TransferContext,
        reader: str,
        fails_at: str | None = None,
    ) -> None:
        self._receiver = receiver
        self._own = own
        self._context = context
        self._reader = reader
        self._fails_at = fails_at
        host, port = receiver.bootstrap_addr
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._shards: Sequence[ShardReceiver] = ()
        self._layouts: dict[int, KVLayout] = {}
        """Offers by the index of their shard in `_shards`."""
        self._has_layouts = threading.Event()
        """Set once all shards have layouts."""
        self.has_returned = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether no read into the slots is in flight any more."""
        return self.has_returned.is_set() and all(shard.has_ended for shard in self._shards)

    def get_transfer_metric(self) -> KVTransferMetric:
        """What was read so far; the seconds are those of the shard with the most."""
        shards = self._shards
        return KVTransferMetric(
            max((shard.read_seconds for shard in shards), default=0.0),
            sum(shard.num_bytes_read for shard in shards),
            {way: sum(one.metadata_bytes[way] for one in shards) for way in (CONTROL, TRANSPORT)},
        )

    def run(self) -> None:
        """Receive the prompt. Never raises. `has_ended` is true afterwards, unless the transport
        never lets go of the slots."""
        metadata = None
        try:
            self._shards = self._make_shards()
            self._run_shards()
            metadata = self._shards[0].metadata
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._receiver.fail(f"receiving the prompt failed: {type(error).__name__}: {error}")
        if metadata is not None:
            self._receiver.come(metadata)
        self.has_returned.set()
        if metadata is None or self._receiver.cancelled.is_set():
            self._context.sessions.probe()

    def _run_shards(self) -> None:
        """Run all shards, and return when all have ended."""
        first, *others = self._shards
        for at, shard in enumerate(others):
            thread = threading.Thread(target=shard.run, name="disagg-shard", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._receiver.fail(f"no thread for a part of the prompt: {error}")
                # They end at once, since the prompt has failed.
                for unstarted in others[at:]:
                    unstarted.run()
                break
        first.run()
        for shard in others:
            shard.join()

    def _make_shards(self) -> list[ShardReceiver]:
        shards = []
        for place, route in enumerate(self._receiver.sources):
            rank = RankPlace(route.rank, route.num_ranks, route.attn_tp_size)
            readers = rank.readers(self._context.place)
            source = Source(
                where=self._where,
                endpoint=route.endpoint,
                instance_id=route.instance_id,
                room=self._receiver.bootstrap_room,
                reader=self._reader,
                part=readers.index(self._context.place.rank),
                num_parts=len(readers),
            )
            shards.append(
                ShardReceiver(
                    source,
                    self._own,
                    self._context,
                    slice_of=functools.partial(self._shard_slice, place),
                    on_failure=self._receiver.fail,
                    cancelled=self._receiver.cancelled,
                    fails_at=None if place else self._fails_at,
                )
            )
        return shards

    def _shard_slice(self, place: int, layout: KVLayout) -> ShardSlice:
        """What to read for the shard at `place`, once all shards have their layouts."""
        with self._lock:
            self._layouts[place] = layout
            if len(self._layouts) == len(self._shards):
                self._has_layouts.set()
        while not self._has_layouts.wait(_POLL_S):
            if self._receiver.cancelled.is_set():
                raise RoomFailed(self._receiver.cancelled.why)
        layouts = [self._layouts[at] for at in range(len(self._shards))]
        try:
            return self._context.geometry.slices(layouts, self._receiver.bootstrap_room)[place]
        except CannotServe as error:
            raise cannot_serve(self._where, str(error)) from None

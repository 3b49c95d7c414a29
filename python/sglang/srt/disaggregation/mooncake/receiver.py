"""A KV receiver: reads a prompt from all prefill ranks that have a shard of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import (
    BaseKVReceiver,
    BootstrapAddr,
    KVPoll,
    KVTransferError,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.control_connection import (
    Cancellation,
    RoomFailed,
    incompatible,
)
from sglang.srt.disaggregation.common.geometry import IncompatibleLayouts, ShardSlice
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.page_reader import OwnSlots, Source
from sglang.srt.disaggregation.common.protocol import KVLayout
from sglang.srt.disaggregation.common.transfer_context import RankPlace
from sglang.srt.disaggregation.mooncake.prefill_servers import TOO_MANY
from sglang.srt.disaggregation.mooncake.shard_receiver import ShardReceiver

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.disaggregation.mooncake.prefill_peer import PrefillPeer

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
"""Seconds within which a shard that waits for the layouts of others notices that it waits in
vain."""


class MooncakeKVReceiver(BaseKVReceiver):
    """Receives one prompt on one rank.

    A `PrefillPeer` first asks whether the prefill server has the request. Then the thread
    `disagg-prompt` reads the shard of the first prefill rank, and one thread `disagg-shard` reads
    each further shard. The ranges of heads are settled once all ranks have sent their layouts. A
    failed shard ends the others. The scheduler's thread calls the methods of `BaseKVReceiver`; any
    thread may call the others.

    Attributes:
        bootstrap_addr: As the request names it.
        sources: Ranks to read from, once the prefill server has said that it has the request.
        since: Time at which asking began, by `time.monotonic`.
        serial: First question with the room; None: there was none. The peer's thread alone.
        unknown_since: Time of the first answer that the room is not known; None: there was none.
            The peer's thread alone.
        cancelled: Ends the read, with the reason of the failure.
        has_returned: Set when no thread reads, or will.
    """

    def __init__(
        self, mgr: MooncakeKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.metadata = None
        self.sources: Sequence[Route] = ()
        self.since = 0.0
        self.serial: int | None = None
        self.unknown_since: float | None = None
        self.cancelled = Cancellation()
        self.has_returned = threading.Event()
        self._servers = mgr.prefill_servers
        self._context = self._servers.context
        self._peer: PrefillPeer | None = None
        """The server that is asked about the room."""
        self._is_reading = False
        self._shards: Sequence[ShardReceiver] = ()
        self._layouts: dict[ShardReceiver, KVLayout] = {}
        self._slices: dict[ShardReceiver, ShardSlice] = {}
        self._has_slices = threading.Event()
        self._lock = threading.Lock()

    # -- the scheduler's thread ------------------------------------------------------------------

    def init(self) -> None:
        self.since = time.monotonic()
        self._peer = self._servers.find(self.bootstrap_addr)
        if self._peer is None:
            self.fail(TOO_MANY)
        else:
            self._peer.ask(self)

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        *,
        state_indices: Sequence[int] = (),
        decode_prefix_len: int = 0,
    ) -> None:
        own = OwnSlots(
            pages=kv_indices,
            first_page=decode_prefix_len // self._context.geometry.pools[0].page_size,
            state=next(iter(state_indices), None),
        )
        if self._peer is not None:
            self._peer.leave(self)
        reader, fails_at = self._servers.new_reader()
        self._is_reading = True
        try:
            self._servers.reading.submit(lambda: self._read(own, reader, fails_at))
        except RuntimeError as error:
            self.fail(f"no thread for the prompt: {error}")
            self.has_returned.set()

    def poll(self) -> KVPoll:
        if self.metadata is not None:
            return KVPoll.Success
        if self.cancelled.is_set():
            return KVPoll.Failed
        if self._is_reading:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self.sources else KVPoll.Bootstrapping

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self.cancelled.why if self.poll() == KVPoll.Failed else "")

    @property
    def has_ended(self) -> bool:
        if not self._is_reading:
            return True
        return self.has_returned.is_set() and all(shard.has_ended for shard in self._shards)

    def get_transfer_metric(self) -> KVTransferMetric:
        """What was read so far; the seconds are those of the shard with the most."""
        shards = self._shards
        readers = [shard.reader for shard in shards if shard.reader is not None]
        return KVTransferMetric(
            max((reader.seconds for reader in readers), default=0.0),
            sum(reader.num_bytes for reader in readers),
            {way: sum(one.metadata_bytes[way] for one in shards) for way in (CONTROL, TRANSPORT)},
        )

    def abort(self, reason: str) -> None:
        if self._is_reading:
            self.cancelled.set(reason)
            return
        if self._peer is not None:
            self._peer.leave(self)
        self._servers.decline(self.bootstrap_addr, self.bootstrap_room, reason)

    # -- any thread ------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Note that the prompt will not come; the first reason counts."""
        with self._lock:
            if self.metadata is None:
                self.cancelled.set(why)

    def slice_for(self, shard: ShardReceiver, layout: KVLayout) -> ShardSlice:
        """The slice that `shard` reads. Waits until all shards have layouts.

        Args:
            shard: The caller.
            layout: Layout of its prefill rank.

        Raises:
            RoomFailed: The layouts do not fit, or the prompt was cancelled.
        """
        with self._lock:
            self._layouts[shard] = layout
            is_last = len(self._layouts) == len(self._shards)
        if is_last:
            layouts = [self._layouts[one] for one in self._shards]
            try:
                slices = self._context.geometry.slices(layouts, self.bootstrap_room)
            except IncompatibleLayouts as error:
                raise incompatible(shard.source.where, str(error)) from None
            self._slices = dict(zip(self._shards, slices, strict=True))
            self._has_slices.set()
        while not self._has_slices.wait(_POLL_S):
            if self.cancelled.is_set():
                raise RoomFailed(self.cancelled.why)
        return self._slices[shard]

    # -- the prompt's thread ---------------------------------------------------------------------

    def _read(self, own: OwnSlots, reader: str, fails_at: str | None) -> None:
        """Read the prompt. Never raises. `has_ended` is true afterwards, unless the transport never
        lets go of the slots.

        Args:
            own: Place of the prompt in this server's pools.
            reader: Id drawn for this prompt, the same on all ranks of this server.
            fails_at: Step of `STEPS` that fails, for tests.
        """
        metadata = None
        try:
            self._shards = [
                ShardReceiver(self, self._context, self._source(route, reader), own)
                for route in self.sources
            ]
            self._shards[0].fails_at = fails_at
            self._run_shards()
            metadata = self._shards[0].metadata
        except Exception as error:
            logger.exception("a prompt could not be received")
            self.fail(f"receiving the prompt failed: {type(error).__name__}: {error}")
        with self._lock:
            if not self.cancelled.is_set():
                self.metadata = metadata
        self.has_returned.set()
        if metadata is None or self.cancelled.is_set():
            self._context.sessions.probe()

    def _source(self, route: Route, reader: str) -> Source:
        own = self._context.place
        rank = RankPlace(route.rank, route.num_ranks, route.attn_tp_size)
        readers = rank.readers(own)
        host, port = self.bootstrap_addr
        return Source(
            where=f"{host}:{port}",
            endpoint=route.endpoint,
            instance_id=route.instance_id,
            room=self.bootstrap_room,
            reader=reader,
            part=readers.index(own.rank),
            num_parts=len(readers),
        )

    def _run_shards(self) -> None:
        """Run all shards, and return when all have ended."""
        first, *others = self._shards
        threads = []
        for shard in others:
            thread = threading.Thread(target=shard.run, name="disagg-shard", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.fail(f"no thread for a part of the prompt: {error}")
                shard.run()  # It ends at once, since the prompt has failed.
            else:
                threads.append(thread)
        first.run()
        for thread in threads:
            thread.join()

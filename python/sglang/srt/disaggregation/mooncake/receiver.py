"""KV receivers, and the prefill servers that they ask and read from."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
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
from sglang.srt.disaggregation.common.geometry import IncompatibleLayouts, ShardSlice
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.transfer_context import TransferContext
from sglang.srt.disaggregation.control.control_client import RoomFailed, incompatible
from sglang.srt.disaggregation.control.protocol import KVLayout
from sglang.srt.disaggregation.mooncake.prefill_peer import CLOSE_S, PrefillPeer
from sglang.srt.disaggregation.mooncake.shard_receiver import STEPS, OwnSlots, ShardReceiver
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.network import canonical_host, wait_until

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 256
"""Most prefill servers, each with a thread and a connection while there is anything to ask."""
TOO_MANY: Final = f"this server asks {MAX_PEERS} prefill servers already, which do not answer"
_POLL_S: Final = 0.1
"""Seconds within which a shard that waits for the layouts of others notices that it waits in
vain."""


class PrefillServers:
    """The prefill servers of a rank. Scheduler's thread.

    Threads: `disagg-peer`, one for each prefill server that is asked about rooms; `disagg-prompt`,
    one for each prompt that is read.

    Args:
        instance_id: Id drawn at the start, the same on all ranks of this server and different on
            every other server.
        failure_prob: Share of prompts that fail by injection.
    """

    def __init__(
        self, context: TransferContext, instance_id: str, failure_prob: float = 0.0
    ) -> None:
        self.context = context
        self._instance_id = instance_id
        self._failure_prob = failure_prob
        self._num_readers = 0
        self._asking = CallThreads("disagg-peer")
        self.reading = CallThreads("disagg-prompt")
        self._peers: dict[BootstrapAddr, PrefillPeer] = {}
        """Keys are canonical host and port; the last used comes last."""

    def new_reader(self) -> tuple[str, str | None]:
        """Id of the next prompt's reader, and the step that fails by injection, or None. All ranks
        read the same prompts in the same order."""
        fails = random.random() < self._failure_prob
        reader = f"{self._instance_id} {self._num_readers}"
        self._num_readers += 1
        return reader, random.choice(STEPS) if fails else None

    def find(self, address: BootstrapAddr) -> PrefillPeer | None:
        """The prefill server with this bootstrap server; None: there are too many to ask another
        one."""
        host, port = address
        key = canonical_host(host), port
        peer = self._peers.pop(key, None)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                idle = next((one for one, peer in self._peers.items() if peer.is_idle), None)
                if idle is None:
                    return None
                self._peers.pop(idle).close()
            peer = PrefillPeer(*key, self.context, self._asking)
        self._peers[key] = peer
        return peer

    def decline(self, address: BootstrapAddr, room: int, reason: str) -> None:
        if self.context.place.rank:
            return  # One rank speaks for all.
        if (peer := self.find(address)) is None:
            logger.warning("room %d could not be declined: %s", room, TOO_MANY)
        else:
            peer.decline(room, reason)

    def close(self) -> None:
        """Accept no more prompts, and end the threads that ask; they first decline what they can.
        Prompts on their way end by themselves."""
        for peer in self._peers.values():
            peer.close()
        wait_until(lambda: not any(peer.has_thread for peer in self._peers.values()), CLOSE_S)
        self._asking.close()
        self.reading.close()


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
        failure: Reason why the prompt will not come, which ends the read; None: it may come.
        has_returned: Set when no thread reads, or will.
    """

    def __init__(
        self, mgr: MooncakeKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.bootstrap_addr = bootstrap_addr
        self.sources: Sequence[Route] = ()
        self.since = 0.0
        self.serial: int | None = None
        self.unknown_since: float | None = None
        self.failure: str | None = None
        self.has_returned = threading.Event()
        self._servers = mgr.prefill_servers
        self._peer: PrefillPeer | None = None
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
            first_page=decode_prefix_len // self._servers.context.geometry.pools[0].page_size,
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
        if self.failure is not None:
            return KVPoll.Failed
        if self._is_reading:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self.sources else KVPoll.Bootstrapping

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self.failure or "")

    @property
    def has_ended(self) -> bool:
        if not self._is_reading:
            return True
        return self.has_returned.is_set() and all(shard.has_ended for shard in self._shards)

    def get_transfer_metric(self) -> KVTransferMetric:
        """Amounts read so far, and the seconds of the slowest shard."""
        shards = self._shards
        return KVTransferMetric(
            max((shard.seconds for shard in shards), default=0.0),
            sum(shard.num_bytes for shard in shards),
            {way: sum(one.metadata_bytes[way] for one in shards) for way in (CONTROL, TRANSPORT)},
            sum((one.checked for one in shards), Counter()),
        )

    def abort(self, reason: str) -> None:
        if self._is_reading:
            self.fail(reason)
            return
        if self._peer is not None:
            self._peer.leave(self)
        self._servers.decline(self.bootstrap_addr, self.bootstrap_room, reason)

    # -- any thread ------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Note that the prompt will not come; the first reason counts."""
        with self._lock:
            if self.metadata is None and self.failure is None:
                self.failure = why

    def slice_for(self, shard: ShardReceiver, layout: KVLayout) -> ShardSlice:
        """The slice that `shard` reads. Waits until all shards have layouts. Raises RoomFailed if
        the layouts do not fit, or the prompt has failed."""
        with self._lock:
            self._layouts[shard] = layout
            is_last = len(self._layouts) == len(self._shards)
        if is_last:
            layouts = [self._layouts[one] for one in self._shards]
            try:
                slices = self._servers.context.geometry.slices(layouts, self.bootstrap_room)
            except IncompatibleLayouts as error:
                raise incompatible(shard.where, str(error)) from None
            self._slices = dict(zip(self._shards, slices, strict=True))
            self._has_slices.set()
        while not self._has_slices.wait(_POLL_S):
            if self.failure is not None:
                raise RoomFailed(self.failure)
        return self._slices[shard]

    # -- the prompt's thread ---------------------------------------------------------------------

    def _read(self, own: OwnSlots, reader: str, fails_at: str | None) -> None:
        """Read the prompt. Never raises. `has_ended` is true afterwards, unless the transport never
        lets go of the slots.

        Args:
            reader: Id drawn for this prompt, the same on all ranks of this server.
            fails_at: Step of `STEPS` that fails, for tests.
        """
        context, metadata = self._servers.context, None
        try:
            self._shards = [
                ShardReceiver(self, context, route, reader, own, None if number else fails_at)
                for number, route in enumerate(self.sources)
            ]
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
            metadata = first.metadata
        except Exception as error:
            logger.exception("a prompt could not be received")
            self.fail(f"receiving the prompt failed: {type(error).__name__}: {error}")
        with self._lock:
            if self.failure is None:
                self.metadata = metadata
        self.has_returned.set()
        if self.metadata is None:
            context.sessions.probe()

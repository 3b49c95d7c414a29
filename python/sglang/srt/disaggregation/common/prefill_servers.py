"""The prefill servers that a decode rank knows, and the prompts that it reads from them."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang.srt.disaggregation.base.conn import BootstrapAddr
from sglang.srt.disaggregation.common.asked_room import AskedRoom
from sglang.srt.disaggregation.common.geometry import IncompatibleLayouts, RankPlace
from sglang.srt.disaggregation.common.prefill_groups import PrefillGroups
from sglang.srt.disaggregation.common.prefill_server import CLOSE_S, DecodeRank, PrefillServer
from sglang.srt.disaggregation.common.shard_read import (
    STEPS,
    OwnSlots,
    Shard,
    ShardRead,
    give_up,
)
from sglang.srt.disaggregation.control.control_client import ControlClient, RoomFailed, incompatible
from sglang.srt.disaggregation.control.protocol import Hello, KVLayout
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.network import wait_until

logger = logging.getLogger(__name__)

MAX_SERVERS: Final = 256
"""Most prefill servers. Each DP group has a thread and connections while it is asked."""
TOO_MANY: Final = f"this server asks {MAX_SERVERS} prefill servers already, which do not answer"


class PrefillServers:
    """The prefill servers of a rank. Scheduler's thread.

    Threads: `disagg-peer`, one for each DP group of a prefill server that is asked about rooms;
    `disagg-prompt`, one for each prompt that is read.

    Args:
        instance_id: Id drawn at the start, the same on all ranks of this server and different on
            every other server.
        failure_prob: Share of prompts that fail by injection.
    """

    def __init__(self, rank: DecodeRank, instance_id: str, failure_prob: float = 0.0) -> None:
        self.rank = rank
        self._instance_id = instance_id
        self._failure_prob = failure_prob
        self._num_readers = 0
        self._asking = CallThreads("disagg-peer")
        self._reading = CallThreads("disagg-prompt")
        self._servers: dict[BootstrapAddr, PrefillGroups] = {}
        """The last used comes last."""

    def new_reader(self) -> tuple[str, str | None]:
        """Id of the next prompt's reader, and the step that fails by injection, or None. All ranks
        read the same prompts in the same order."""
        fails = random.random() < self._failure_prob
        reader = f"{self._instance_id} {self._num_readers}"
        self._num_readers += 1
        return reader, random.choice(STEPS) if fails else None

    def find(self, address: BootstrapAddr) -> PrefillGroups | None:
        """The prefill server with this bootstrap server; None: there are too many to ask another
        one."""
        server = self._servers.pop(address, None)
        if server is None:
            if len(self._servers) >= MAX_SERVERS:
                idle = next((one for one, server in self._servers.items() if server.is_idle), None)
                if idle is None:
                    return None
                self._servers.pop(idle).close()
            server = PrefillGroups(*address, self.rank, self._asking)
        self._servers[address] = server
        return server

    def ask(self, address: BootstrapAddr, room: AskedRoom) -> PrefillGroups | None:
        """Ask the prefill server with this bootstrap server about a room. None: it is not asked,
        and the room says why."""
        server = self.find(address)
        if server is None:
            room.failure = TOO_MANY
        else:
            server.groups[0].ask(room)
            if len(server.groups) > 1:
                server.seek(room)
        return server

    def read(self, server: PrefillServer, room: AskedRoom, own: OwnSlots) -> PromptRead:
        """Read the prompt of a room that `server` has."""
        reader, fails_at = self.new_reader()
        read = PromptRead(room, own, server, self.rank, reader, fails_at)
        try:
            self._reading.submit(read.run)
        except RuntimeError as error:
            read.fail(f"no thread for the prompt: {error}")
            read.has_returned.set()
        return read

    def decline(
        self, address: BootstrapAddr, room: int, reason: str, found: PrefillServer | None = None
    ) -> None:
        """Tell a prefill server that a room is not wanted. `found`: the group that has it."""
        if self.rank.place.rank:
            return  # One rank speaks for all.
        if (server := self.find(address)) is None:
            logger.warning("room %d could not be declined: %s", room, TOO_MANY)
        else:
            server.decline(room, reason, found)

    def close(self) -> None:
        """Accept no more prompts, and end the threads that ask; they first decline what they can.
        Prompts on their way end by themselves."""
        for server in self._servers.values():
            server.close()
        wait_until(lambda: not any(server.has_thread for server in self._servers.values()), CLOSE_S)
        self._asking.close()
        self._reading.close()


@dataclass(slots=True, eq=False)
class PromptRead:
    """Reads a prompt from all its prefill ranks. The thread that calls `run` reads the shard of the
    first one, and one thread `disagg-shard` reads each further shard. A failed shard ends the
    others.

    Args:
        room: Room of the prompt, with its prefill ranks.
        reader, fails_at: See `PrefillServers.new_reader`.

    Attributes:
        shards: Set before anything is read. Any thread may look at these attributes.
        metadata: Results of the prefill, once all was read.
        failure: Why the prompt will not come.
        has_returned: Set when no thread reads, or will.
    """

    room: AskedRoom
    own: OwnSlots
    server: PrefillServer
    rank: DecodeRank
    reader: str
    fails_at: str | None
    shards: Sequence[ShardRead] = ()
    metadata: FirstToken | None = None
    failure: str | None = None
    has_returned: threading.Event = field(default_factory=threading.Event)
    _clients: list[ControlClient] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_ended(self) -> bool:
        """True if no read into the slots is in flight, or will begin."""
        return self.has_returned.is_set() and all(one.has_ended for one in self.shards)

    def fail(self, why: str) -> None:
        """Note that the prompt will not come; the first reason counts. Any thread."""
        with self._lock:
            if self.metadata is None and self.failure is None:
                self.failure = why

    def run(self) -> None:
        """Read the prompt. Never raises. All shards have ended then, unless the transport never
        lets go of the slots."""
        try:
            self.shards = self._begin()
        except RoomFailed as error:
            self._give_up(str(error), error)
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._give_up(f"receiving the prompt failed: {type(error).__name__}: {error}", error)
        threads = []
        for shard in self.shards[1:]:
            thread = threading.Thread(target=shard.run, name="disagg-shard", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.fail(f"no thread for a part of the prompt: {error}")
                shard.run()  # Ends at once, because the prompt has failed.
            else:
                threads.append(thread)
        for shard in self.shards[:1]:
            shard.run()
        for thread in threads:
            thread.join()
        for shard in self.shards:
            if shard.has_settled:
                self.rank.reads.sessions.leave(shard.session_id)
            if shard.metadata is not None:
                self.server.clients.give_back(shard.client)
        with self._lock:
            if self.failure is None:
                self.metadata = self.shards[0].metadata
        self.has_returned.set()
        if self.metadata is None:
            self.rank.reads.sessions.probe()

    def _begin(self) -> list[ShardRead]:
        """The reads of all shards. Raises RoomFailed if the prefill ranks' pages do not fit, or one
        of them does not answer."""
        rank, where, sources = self.rank, self.server.where, self.room.sources
        for one in sources:
            client = self.server.clients.lend(one.endpoint, one.instance_id, lambda: self.failure)
            self._clients.append(client)
        layouts = []
        for client in self._clients:
            if client.layout is None:
                layout = client.ask(Hello(), KVLayout)
                if (why := rank.geometry.incompatibility(layout)) is not None:
                    raise incompatible(where, why)
                client.layout = layout
            layouts.append(client.layout)
        try:
            pieces = rank.geometry.slices(layouts, self.room.number)
        except IncompatibleLayouts as error:
            raise incompatible(where, str(error)) from None
        shards: list[Shard] = []
        for route, layout, piece in zip(sources, layouts, pieces, strict=True):
            theirs = RankPlace(route.rank, route.num_ranks, route.attn_tp_size)
            readers = theirs.partners(rank.place)
            shard = Shard(
                room=self.room.number,
                reader=self.reader,
                where=where,
                part=readers.index(rank.place.rank),
                num_parts=len(readers),
                layout=layout,
                piece=piece,
                own=self.own,
            )
            shards.append(shard)
        reads: list[ShardRead] = []
        for client, shard in zip(self._clients, shards, strict=True):
            layout = shard.layout
            # Nothing below fails; else sessions would stay entered.
            rank.reads.sessions.enter(layout.session_id, layout.instance_id, client.endpoint)
            fails_at = None if reads else self.fails_at
            reads.append(ShardRead(shard, rank.reads, client, self.fail, fails_at))
        return reads

    def _give_up(self, why: str, error: Exception) -> None:
        self.fail(why)
        give_up(self._clients, self.room.number, self.reader, str(error))

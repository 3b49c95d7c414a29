"""The prefill servers that a decode rank knows, and the prompts that it reads from them."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import BootstrapAddr
from sglang.srt.disaggregation.common.geometry import IncompatibleLayouts, RankPlace
from sglang.srt.disaggregation.control.control_client import ControlClient, RoomFailed, incompatible
from sglang.srt.disaggregation.control.protocol import Hello, KVLayout
from sglang.srt.disaggregation.mooncake.prefill_server import CLOSE_S, DecodeRank, PrefillServer
from sglang.srt.disaggregation.mooncake.shard_read import (
    STEPS,
    OwnSlots,
    Shard,
    ShardRead,
    give_up,
)
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.network import canonical_host, wait_until

logger = logging.getLogger(__name__)

MAX_SERVERS: Final = 256
"""Most prefill servers, each with a thread and connections while there is anything to ask."""
TOO_MANY: Final = f"this server asks {MAX_SERVERS} prefill servers already, which do not answer"


class PrefillServers:
    """The prefill servers of a rank. Scheduler's thread.

    Threads: `disagg-peer`, one for each prefill server that is asked about rooms; `disagg-prompt`,
    one for each prompt that is read.

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
        self.reading = CallThreads("disagg-prompt")
        self._servers: dict[BootstrapAddr, PrefillServer] = {}
        """Keys are canonical host and port; the last used comes last."""

    def new_reader(self) -> tuple[str, str | None]:
        """Id of the next prompt's reader, and the step that fails by injection, or None. All ranks
        read the same prompts in the same order."""
        fails = random.random() < self._failure_prob
        reader = f"{self._instance_id} {self._num_readers}"
        self._num_readers += 1
        return reader, random.choice(STEPS) if fails else None

    def find(self, address: BootstrapAddr) -> PrefillServer | None:
        """The prefill server with this bootstrap server; None: there are too many to ask another
        one."""
        host, port = address
        key = canonical_host(host), port
        server = self._servers.pop(key, None)
        if server is None:
            if len(self._servers) >= MAX_SERVERS:
                idle = next((one for one, server in self._servers.items() if server.is_idle), None)
                if idle is None:
                    return None
                self._servers.pop(idle).close()
            server = PrefillServer(*key, self.rank, self._asking)
        self._servers[key] = server
        return server

    def decline(self, address: BootstrapAddr, room: int, reason: str) -> None:
        if self.rank.place.rank:
            return  # One rank speaks for all.
        if (server := self.find(address)) is None:
            logger.warning("room %d could not be declined: %s", room, TOO_MANY)
        else:
            server.decline(room, reason)

    def close(self) -> None:
        """Accept no more prompts, and end the threads that ask; they first decline what they can.
        Prompts on their way end by themselves."""
        for server in self._servers.values():
            server.close()
        wait_until(lambda: not any(server.has_thread for server in self._servers.values()), CLOSE_S)
        self._asking.close()
        self.reading.close()


@dataclass(slots=True, kw_only=True, eq=False)
class PromptRead:
    """Reads a prompt from all its prefill ranks. The thread that calls `run` reads the shard of the
    first one, and one thread `disagg-shard` reads each further shard. A failed shard ends the
    others.

    Args:
        reader, fails_at: See `PrefillServers.new_reader`.
        failure: Reason why the prompt will not come, or None.
        on_failure: Fails the prompt; the first reason counts.

    Attributes:
        shards: Set before anything is read; any thread may look at them.
    """

    room: int
    own: OwnSlots
    reader: str
    fails_at: str | None
    rank: DecodeRank
    server: PrefillServer
    sources: Sequence[Route]
    failure: Callable[[], str | None]
    on_failure: Callable[[str], None]
    shards: Sequence[ShardRead] = ()
    _clients: list[ControlClient] = field(default_factory=list)

    def run(self) -> FirstToken | None:
        """Read the prompt; return its metadata, or None if it has failed. Never raises. All shards
        have ended then, unless the transport never lets go of the slots."""
        pool = self.server.clients
        try:
            for one in self.sources:
                self._clients.append(pool.lend(one.endpoint, one.instance_id, self.failure))
            self.shards = self._begin()
        except RoomFailed as error:
            self._fail(str(error), error)
            return None
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._fail(f"receiving the prompt failed: {type(error).__name__}: {error}", error)
            return None
        first, *others = self.shards
        threads = []
        for shard in others:
            thread = threading.Thread(target=shard.run, name="disagg-shard", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.on_failure(f"no thread for a part of the prompt: {error}")
                shard.run()  # Ends at once, because the prompt has failed.
            else:
                threads.append(thread)
        first.run()
        for thread in threads:
            thread.join()
        for shard in self.shards:
            if shard.metadata is not None:
                pool.give_back(shard.client)
        return first.metadata

    def _begin(self) -> list[ShardRead]:
        """The reads of all shards. Raises RoomFailed if the prefill ranks' pages do not fit, or one
        of them does not answer."""
        rank, where = self.rank, self.server.where
        layouts = []
        for client in self._clients:
            if client.layout is None:
                layout = client.ask(Hello(), KVLayout)
                if (why := rank.geometry.incompatibility(layout)) is not None:
                    raise incompatible(where, why)
                client.layout = layout
            layouts.append(client.layout)
        try:
            pieces = rank.geometry.slices(layouts, self.room)
        except IncompatibleLayouts as error:
            raise incompatible(where, str(error)) from None
        shards: list[ShardRead] = []
        ways = zip(self.sources, self._clients, layouts, pieces, strict=True)
        for route, client, layout, piece in ways:
            theirs = RankPlace(route.rank, route.num_ranks, route.attn_tp_size)
            readers = theirs.partners(rank.place)
            shard = Shard(
                room=self.room,
                reader=self.reader,
                where=where,
                part=readers.index(rank.place.rank),
                num_parts=len(readers),
                layout=layout,
                piece=piece,
                own=self.own,
            )
            fails_at = None if shards else self.fails_at
            shards.append(ShardRead(shard, rank.reads, client, self.on_failure, fails_at))
        return shards

    def _fail(self, why: str, error: Exception) -> None:
        self.on_failure(why)
        give_up(self._clients, self.room, self.reader, str(error))

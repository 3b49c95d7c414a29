"""A prompt on its way between two small pools: rooms, mover of bytes, threads."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import PrefillRooms, failure, until
from rigs.disaggregation.pd_rig import SLOW_BLOCKS, LocalMover, one_rank
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import BootstrapAddr, KVPoll
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.asked_room import AskedRoom
from sglang.srt.disaggregation.common.conn import CommonKVDecodeManager, CommonKVReceiver
from sglang.srt.disaggregation.common.geometry import PoolGeometry, RankPlace
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.common.prefill_server import DecodeRank, FindRank
from sglang.srt.disaggregation.common.prefill_servers import PrefillServers
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.sessions import Engine, Sessions
from sglang.srt.disaggregation.common.shard_read import SharedReads
from sglang.srt.disaggregation.common.staging import LinkCosts, Staging
from sglang.srt.disaggregation.control.protocol import RowsLayout
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.network import wait_until

PAGE, PAGES, ROOM = 2, 16, 5
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d")
LONG_TIMEOUTS = Timeouts(unknown_room=60, waiting=60, silence=30)
SHORT_TIMEOUTS = Timeouts(unknown_room=0.3, waiting=0.3, silence=0.4)


class Place:
    """A pool of two layers whose pages can be told apart, and its geometry."""

    def __init__(self, value: float) -> None:
        self.pool = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 1, 2, 2, "cpu")
        for number, buffer in enumerate(buffer for part in self.pool.parts for buffer in part):
            slots = torch.arange(len(buffer)).reshape(-1, 1, 1)
            buffer.copy_((value + number + slots * 0.01) * torch.ones(1, 1, 2))
        self.geometry = PoolGeometry.of([self.pool], "w", torch.float32)

    def page(self, page: int) -> torch.Tensor:
        """Content of a page in all buffers: `[buffers, page size, 2]`."""
        span = slice(page * PAGE, (page + 1) * PAGE)
        buffers = [buffer for part in self.pool.parts for buffer in part]
        return torch.stack([buffer[span, 0].clone() for buffer in buffers])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """State that all prompts of a decode rank share."""

    place: RankPlace
    geometry: PoolGeometry
    engine: Engine
    staging: Staging
    checksums: RoomChecksums
    metadata: MetadataReader
    sessions: Sessions
    find_rank: FindRank
    timeouts: Timeouts
    link: LinkCosts | None = None

    def rank(self) -> DecodeRank:
        reads = SharedReads(
            engine=self.engine,
            staging=self.staging,
            checksums=self.checksums,
            metadata=self.metadata,
            sessions=self.sessions,
            timeouts=self.timeouts,
            link=self.link,
        )
        return DecodeRank(
            place=self.place, geometry=self.geometry, reads=reads, find_rank=self.find_rank
        )

    def servers(self) -> PrefillServers:
        return PrefillServers(self.rank(), "decode server")


class Prompt(CommonKVReceiver):
    """A receiver that knows its prefill server's ranks, and may fail by injection.

    Args:
        context: Parts that the receivers of the rank share.
        sources: The prefill server's ranks.
        reader: Id of the prompt's reader.
        fails_at: Step of `STEPS` that fails.
    """

    def __init__(
        self,
        context: Context,
        sources: Sequence[Route],
        room: int,
        reader: str,
        fails_at: str | None = None,
    ) -> None:
        servers = context.servers()
        servers.new_reader = lambda: (reader, fails_at)  # type: ignore[method-assign]
        super().__init__(cast(CommonKVDecodeManager, _Servers(servers)), ("host", 1), room)
        self._server = servers.find(("host", 1))
        assert self._server is not None
        (self._group,) = self._server.groups
        self._asked = AskedRoom(room, tuple(sources))

    @property
    def has_returned(self) -> threading.Event:
        """Set when no thread reads the prompt, or will."""
        assert self._read is not None, "it is read"
        return self._read.has_returned

    @property
    def outcome(self) -> FirstToken | str | None:
        """The metadata, or the reason of a failure."""
        return failure(self) if self.poll() == KVPoll.Failed else self.metadata

    def cancel(self, reason: str = "the request was aborted") -> None:
        self.abort(reason)


@dataclasses.dataclass
class _Servers:
    """The part of a manager that receivers use."""

    prefill_servers: PrefillServers


class Scene:
    """The pools of a prefill and a decode server, the rooms, and the mover of bytes.

    Args:
        unit_bytes: Bytes of a unit of packed pages; None: pages are not packed.
        link: Costs of the link on which pages are packed.
        rows: Rows of metadata that the prefill server offers.
    """

    def __init__(
        self,
        unit_bytes: int | None = None,
        link: LinkCosts = SLOW_BLOCKS,
        rows: RowsLayout | None = None,
    ) -> None:
        self.there, self.here = Place(100), Place(500)
        self.mover = LocalMover()
        self.sessions = Sessions(self.mover, lambda endpoint: endpoint not in self.mover.gone)
        self.unit_bytes = unit_bytes
        self.link = None if unit_bytes is None else link
        self.units, self.staging = self._make_staging(), self._make_staging()
        """Staging memory of the prefill server, and of the prompts."""
        session_id = self.mover.get_session_id()
        layout = self.there.geometry.layout(
            "instance", session_id, unit_bytes=unit_bytes or 0, rows=rows
        )
        packer = None if unit_bytes is None else Packer(self.there.geometry.page_rows(), self.units)
        self.prefill = PrefillRooms(
            layout,
            "127.0.0.1",
            unwanted_s=300,
            silent_s=300,
            packer=packer,
            pools=[self.there.pool],
        )
        self.endpoint = f"tcp://127.0.0.1:{self.prefill.port}"
        self._readers = itertools.count()
        self.prompts: list[Prompt] = []

    def _make_staging(self) -> Staging:
        cpu = torch.device("cpu")
        if self.unit_bytes is None:
            return Staging(self.mover, cpu)
        return Staging(self.mover, cpu, num_bytes=self.unit_bytes)

    def context(self, timeouts: Timeouts = LONG_TIMEOUTS, **fields: Any) -> Context:
        """Parts that the receivers of the rank share; `fields` replaces some."""
        context = Context(
            place=RankPlace(),
            geometry=self.here.geometry,
            engine=self.mover,
            staging=self.staging,
            checksums=RoomChecksums([self.here.pool]),
            metadata=MetadataReader(),
            sessions=self.sessions,
            find_rank=lambda *_: one_rank(self.endpoint),
            timeouts=timeouts,
            link=self.link,
        )
        return dataclasses.replace(context, **fields)

    def begin(
        self,
        own_pages: Sequence[int],
        first_page: int = 0,
        timeouts: Timeouts = LONG_TIMEOUTS,
        room: int = ROOM,
        fails_at: str | None = None,
        **fields: Any,
    ) -> Prompt:
        prompt = Prompt(
            self.context(timeouts, **fields),
            (one_rank(self.endpoint),),
            room,
            f"reader {next(self._readers)}",
            fails_at,
        )
        prompt.send_metadata(own_pages, decode_prefix_len=first_page * PAGE)
        self.prompts.append(prompt)
        return prompt

    def end(self, prompt: Prompt) -> Prompt:
        """`prompt`, once its thread is done."""
        assert wait_until(prompt.has_returned.is_set, 30, interval=0.005), "it has not ended"
        return prompt

    def failure(self, prompt: Prompt) -> str:
        """Reason why `prompt` did not arrive."""
        outcome = self.end(prompt).outcome
        assert isinstance(outcome, str) and prompt.has_ended
        return outcome

    def assert_read(self, theirs: Sequence[int], own: Sequence[int]) -> None:
        """Assert that these pages were read and no others were touched."""
        untouched = Place(500)
        source = dict(zip(own, theirs, strict=True))
        for page in range(PAGES + 1):
            want = self.there.page(source[page]) if page in source else untouched.page(page)
            assert torch.equal(self.here.page(page), want), page

    def assert_untouched(self) -> None:
        self.assert_read([], [])

    def given_up(self) -> str:
        """Reason for which the prompt was given up, as told to the prefill server."""
        heard: dict[int, str] = {}

        def is_heard() -> bool:
            heard.update(self.prefill.take_given_up())
            return bool(heard)

        until(is_heard)
        return heard[ROOM].removeprefix("the decode server gave it up: ")

    def close(self) -> None:
        """End the threads and the prefill server."""
        self.mover.release()
        for prompt in self.prompts:
            prompt.cancel()
            wait_until(prompt.has_returned.is_set, 10)
        self.prefill.close()


def receiver_of(servers: PrefillServers, address: BootstrapAddr, room: int) -> CommonKVReceiver:
    """A receiver of a rank that has these prefill servers."""
    return CommonKVReceiver(cast(CommonKVDecodeManager, _Servers(servers)), address, room)


def sources_of(receiver: CommonKVReceiver) -> list[Route]:
    """The ranks of the group that has the room."""
    return list(receiver._asked.sources)


class Server:
    """A prefill server of one rank, and the peer that a decode rank has of it."""

    def __init__(self, timeouts: Timeouts = LONG_TIMEOUTS) -> None:
        self.scene = Scene()
        self.prefill = self.scene.prefill
        self.route = one_rank(self.scene.endpoint)
        self.look_ups: list[int] = []
        """Ranks that were looked up."""
        self.why: Exception | None = None
        """Error of look-ups."""
        self.servers = self.scene.context(timeouts, find_rank=self._find).servers()
        peer = self.servers.find(("host", 1))
        assert peer is not None
        (self.peer,) = peer.groups

    def _find(self, host: str, port: int, rank: int, dp_rank: int) -> Route:
        assert (host, port, dp_rank) == ("host", 1, 0)
        self.look_ups.append(rank)
        if self.why is not None:
            raise self.why
        return msgspec.structs.replace(self.route, rank=rank)

    def ask(self, room: int = ROOM) -> CommonKVReceiver:
        """Ask whether the prefill server has a room."""
        receiver = receiver_of(self.servers, ("host", 1), room)
        receiver.init()
        return receiver

    def knows(self, room: int = ROOM, receiver: CommonKVReceiver | None = None) -> CommonKVReceiver:
        """Wait until a room is known, and ask again if the server is missed before: the machine
        may stand still for longer than the timeouts. Returns who knows it."""
        asked = [receiver or self.ask(room)]

        def is_so() -> bool:
            if asked[-1].poll() == KVPoll.Failed:
                asked.append(self.ask(room))
            return asked[-1].poll() == KVPoll.WaitingForInput

        until(is_so)
        return asked[-1]

    def restart(self) -> None:
        """Another instance takes the place of the prefill server, at another port."""
        self.prefill.close()
        layout = self.scene.there.geometry.layout("another", self.scene.mover.get_session_id())
        self.prefill = self.scene.prefill = PrefillRooms(
            layout, "127.0.0.1", unwanted_s=300, silent_s=300
        )
        self.route = one_rank(f"tcp://127.0.0.1:{self.prefill.port}", "another")

    def through(self, proxy: ControlProxy) -> None:
        self.route = msgspec.structs.replace(self.route, endpoint=proxy.endpoint)

    def close(self) -> None:
        self.servers.close()
        self.scene.close()

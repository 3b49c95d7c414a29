"""A prefill server's rooms for tests: a clock that stands, and decode servers that ask by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferError
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.conn import CommonKVPrefillManager, CommonKVSender
from sglang.srt.disaggregation.common.geometry import StateSlots
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.room_server import RoomServer
from sglang.srt.disaggregation.control.control_client import ControlClient
from sglang.srt.disaggregation.control.protocol import (
    Answer,
    Answered,
    Asked,
    KVLayout,
    Poll,
    Question,
    RoomStatus,
)
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.network import wait_until

LAYOUT = KVLayout(2, "instance", "session", "layout", {"page size": "4"}, [])
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d", top_logprobs=[(-0.5, 7)])
UNWANTED_S, SILENT_S = 300, 60
"""`SILENT_S` is longer than a machine stands still: connections are silent by the real clock."""


class Clock:
    """A clock that stands still, unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _NoChecksums:
    """In place of `RoomChecksums`, where pages are numbers alone."""

    def draw_pages(self, pages: Sequence[int]) -> list[list[bytes]]:
        return []

    def draw_state(self, slots: StateSlots) -> list[bytes]:
        return []


class _Manager:
    """The part of a manager that senders use, without rows of metadata."""

    def __init__(self, rooms: RoomServer, checksums: RoomChecksums | _NoChecksums) -> None:
        self.rooms = rooms
        self.checksums = checksums

    def free_aux(self, row: int) -> None:
        pass


class PrefillRooms(RoomServer):
    """The rooms of a prefill server, each with a sender; rooms are named by their numbers.

    Args:
        pools: Pools whose pages get checksums.
        args, fields: Arguments of `RoomServer`.
    """

    def __init__(self, *args: Any, pools: Sequence[BaseDevicePool] = (), **fields: Any) -> None:
        self.senders: dict[int, CommonKVSender] = {}
        self._was_claimed: set[int] = set()
        self._was_given_up: set[int] = set()
        super().__init__(*args, **fields)
        checksums = RoomChecksums(pools) if pools else _NoChecksums()
        self._manager = cast(CommonKVPrefillManager, _Manager(self, checksums))

    def open(self, room: int, pages: Sequence[int] = ()) -> None:
        """Begin a request, which has computed `pages`."""
        self._was_claimed.discard(room)
        self._was_given_up.discard(room)
        self.senders[room] = CommonKVSender(self._manager, ("host", 1), room)
        if pages:
            self.add_pages(room, pages)

    def add_pages(self, room: int, pages: Sequence[int]) -> None:
        self.senders[room].send(pages)

    def complete(self, room: int, metadata: FirstToken, row: int | None = None) -> None:
        self.senders[room].complete(metadata, row)

    def end(self, room: int, failure: str = "the request has ended") -> None:
        self.senders[room].abort(failure)

    def forget(self, room: int) -> None:
        self.senders[room].clear()
        del self.senders[room]

    def take_claimed(self) -> list[int]:
        """Rooms that a decode server asks for, and that were not taken yet."""
        for sender in self.senders.values():
            sender.poll()
        claimed = [
            number
            for number, room in list(self._rooms.items())
            if room.reader is not None and number not in self._was_claimed
        ]
        self._was_claimed.update(claimed)
        return claimed

    def take_given_up(self) -> dict[int, str]:
        """Rooms that decode servers have given up, and that were not taken yet."""
        given_up = {
            number: room.failure
            for number, room in list(self._rooms.items())
            if not (room.failure is None or room.has_ended or number in self._was_given_up)
        }
        self._was_given_up.update(given_up)
        return given_up

    def outcome(self, room: int) -> str | None:
        """Outcome of a room: "" if all was read, the reason if it has failed."""
        self._look()
        sender = self.senders[room]
        if (poll := sender.poll()) == KVPoll.Success:
            return ""
        return failure(sender) if poll == KVPoll.Failed else None

    def unheard_of(self, rooms: Iterable[int], limit_s: float) -> dict[int, str]:
        """Rooms that no decode server has named for `limit_s` seconds, with the reason."""
        self._unknown_s = limit_s
        self._look()
        found = {room: self._rooms[room].failure for room in rooms}
        return {room: why for room, why in found.items() if why is not None}

    def _look(self) -> None:
        with self.lock:
            self._fail_silent(self._clock())


def failure(poller: Any) -> str:
    """Why a sender or a receiver has failed."""
    try:
        poller.failure_exception()
    except KVTransferError as error:
        return str(error)
    raise AssertionError("it raises")


class Link(ControlClient):
    """A connection whose messages are bytes, without questions that are repeated."""

    def __init__(self, endpoint: str, secret: DeploymentSecret | None) -> None:
        timeouts = Timeouts(unknown_room=60, waiting=60, silence=SILENT_S)
        super().__init__(endpoint, "instance", secret, timeouts)

    def send(self, message: bytes) -> None:
        if self._is_open:
            self._write(message)
        else:
            self._unsent = message

    def receive(self, timeout: float) -> bytes | None:
        return self._receive(timeout)


class Asker:
    """A decode server's connection, which is open."""

    def __init__(self, port: int, secret: DeploymentSecret | None = None) -> None:
        self.link = Link(f"tcp://127.0.0.1:{port}", secret)
        self._number = 0
        self.until_open()

    def until_open(self) -> None:
        """Wait for the end of the handshake: before it a message takes the place of another."""
        until(lambda: self.link.receive(0.005) is None and self.link._is_greeted)

    def send(self, question: Question, number: int | None = None) -> int:
        self._number = self._number + 1 if number is None else number
        self.link.send(msgspec.msgpack.encode(Asked(self._number, question)))
        return self._number

    def hear(self, timeout_s: float = 10.0) -> Answered:
        message = self.link.receive(timeout_s)
        assert message is not None, "no answer"
        return msgspec.msgpack.decode(message, type=Answered)

    def hears_nothing(self) -> bool:
        """True if no answer is there."""
        return self.link.receive(0.0) is None

    def ask(self, question: Question) -> Answer:
        number = self.send(question)
        answered = self.hear()
        assert (answered.number, answered.instance_id) == (number, "instance")
        return answered.answer

    def look(self, room: int, reader: str = "me", have: int = 0) -> RoomStatus:
        """The state of a room, now."""
        news = self.ask(Poll(room, reader, have, may_wait=False))
        assert isinstance(news, RoomStatus)
        return news


def until(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so` holds; fail after ten seconds."""
    assert wait_until(is_so, 60, interval=0.005)


def fill(prefill: PrefillRooms, room: int) -> None:
    """Open a room whose request has two pages and all its prompt."""
    prefill.open(room, [3, 4])
    prefill.complete(room, TOKEN)

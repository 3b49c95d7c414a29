"""Attacks on prefill and decode servers by whoever reaches their ports, each in its own process.

They run at the lowest priority: what counts is what they make of the servers, not that they share
the machine's cores.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx
import msgspec

from sglang.srt.disaggregation.control.frames import MAX_QUESTION_BYTES, as_frame
from sglang.srt.disaggregation.control.protocol import Asked, Hello, Poll, Question
from sglang.srt.utils.process import raise_file_limit

HOST: Final = "127.0.0.1"
_LOWEST_PRIORITY: Final = 19
_NUM_FLOODS: Final = 4
"""Connections that flood at once."""
_IDLE: Final = {"bootstrap": 300, "control": 1200, "data": 200}
"""Idle connections to each kind of port. Closed connections are opened again."""
_NUM_CLIENTS: Final = 24
"""Hostile clients of the decode server."""
_SHORT_S: Final = 0.05
"""Seconds of a connection that floods and ends."""
_AGAIN_S: Final = 0.02
"""Seconds until what was refused is tried again."""
_LONG_S: Final = 400.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Ports of the servers under attack, all on loopback.

    Attributes:
        control: Control port of the prefill server's only rank.
        bootstrap: Bootstrap port of the prefill server.
        data: Ports of the transport in both servers.
        decode: URL of the decode server.
        stopped: Bootstrap port of a prefill server whose processes are stopped.
    """

    control: int
    bootstrap: int
    data: Sequence[int]
    decode: str
    stopped: int


class Deeds:
    """Number of deeds of an attack. One process writes, one reads."""

    def __init__(self) -> None:
        self._count = multiprocessing.get_context("spawn").Value("q", 0)

    def add(self, count: int = 1) -> None:
        with self._count.get_lock():
            self._count.value += count

    @property
    def count(self) -> int:
        return int(self._count.value)


Attack = Callable[[Targets, Deeds], None]
"""Goes on until its process is killed."""


def flood(targets: Targets, deeds: Deeds) -> None:
    """Questions without a pause, valid ones and others, over a few connections. Half of them end
    soon, and others come in their place."""
    in_threads(partial(flood_once, targets, deeds, seed) for seed in range(_NUM_FLOODS))


def flood_once(targets: Targets, deeds: Deeds, seed: int) -> None:
    rng = random.Random(seed)

    def message() -> bytes:
        room = rng.getrandbits(62)
        questions: list[Question] = [
            Hello(),
            Poll(room, "x", 0),
            Poll(room, "x", 0, may_wait=False),
        ]
        return msgspec.msgpack.encode(Asked(1, rng.choice(questions)))

    messages = [b"\x81" * 200 if rng.random() < 0.1 else message() for _ in range(500)]
    stream = b"".join(map(as_frame, messages))
    with connected(targets.control) as sock:
        sock.settimeout(0.05)
        end = time.monotonic() + (_SHORT_S if seed % 2 else _LONG_S)
        at = 0
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                sent = sock.send(stream[at:])
                at = (at + sent) % len(stream)
                deeds.add(sent)
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1 << 16):
                    return


def endless(targets: Targets, deeds: Deeds) -> None:
    """Messages whose end never comes, some with a length that is too large."""
    lengths = itertools.cycle([1 << 31, MAX_QUESTION_BYTES])
    part = b"x" * (1 << 14)

    def send_one() -> None:
        with connected(targets.control) as sock:
            sock.settimeout(5.0)
            sock.sendall(struct.pack(">I", next(lengths)))
            while True:
                sock.sendall(part)
                deeds.add(len(part))

    in_threads([send_one, send_one])


def idle(targets: Targets, deeds: Deeds) -> None:
    """Connections that say nothing, or hardly anything, to all ports."""
    raise_file_limit()
    wanted = [targets.bootstrap] * _IDLE["bootstrap"] + [targets.control] * _IDLE["control"]
    wanted += [port for port in targets.data for _ in range(_IDLE["data"])]
    open_now: list[tuple[int, socket.socket]] = []
    while True:
        missing = list(wanted)
        kept = []
        for port, sock in open_now:
            if is_open(sock):
                kept.append((port, sock))
                missing.remove(port)
            else:
                sock.close()
        open_now = kept
        for port in missing:
            with contextlib.suppress(OSError):
                sock = socket.create_connection((HOST, port), timeout=0.2)
                open_now.append((port, sock))
                deeds.add()
                if len(open_now) % 2:
                    sock.sendall(b"G")
        time.sleep(1.0)


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while part := sock.recv(4096):
                del part
        except ConnectionError:
            return False
        return False
    return True


def bombs(targets: Targets, deeds: Deeds) -> None:
    """Deeply nested JSON to every port of Mooncake, one of which takes it for a handshake."""
    bomb = b"[" * 1100
    while True:
        for port in targets.data:
            with contextlib.suppress(OSError), connected(port) as sock:
                sock.sendall(struct.pack("<Q", len(bomb)) + bomb)
                deeds.add()
                sock.settimeout(0.2)
                sock.recv(4096)
            time.sleep(0.05)


def foreign_hosts(targets: Targets, deeds: Deeds) -> None:
    """A client of the decode server names hosts that are no prefill servers."""
    meetings = [("192.0.2.1", 8998), ("bootstrap.invalid", 1), (HOST, 9), ("127.0.0.2", 8998)]
    clients(targets, deeds, meetings)


def unknown_rooms(targets: Targets, deeds: Deeds) -> None:
    """A client of the decode server names rooms that the prefill server does not have."""
    clients(targets, deeds, [(HOST, targets.bootstrap)])


def stuck_server(targets: Targets, deeds: Deeds) -> None:
    """A client of the decode server names a prefill server that is stopped."""
    clients(targets, deeds, [(HOST, targets.stopped)])


def clients(targets: Targets, deeds: Deeds, meetings: Sequence[tuple[str, int]]) -> None:
    """Clients of the decode server that name these bootstrap servers, and rooms of their own."""

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        host, port = rng.choice(meetings)
        body = {
            "input_ids": [rng.randrange(300, 2000) for _ in range(400)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 8},
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": rng.getrandbits(62),
        }
        deeds.add()
        httpx.post(f"{targets.decode}/generate", json=body, timeout=_LONG_S)

    numbers = itertools.count()
    in_threads([lambda: ask(next(numbers))] * _NUM_CLIENTS)


ATTACKS: Final[Mapping[str, Attack]] = {
    "flood": flood,
    "endless": endless,
    "idle": idle,
    "bombs": bombs,
    "foreign-hosts": foreign_hosts,
    "unknown-rooms": unknown_rooms,
    "stuck-server": stuck_server,
}


@contextmanager
def under_attack(names: Sequence[str], targets: Targets) -> Iterator[Mapping[str, Deeds]]:
    """Context in which the attacks of these names go on; their deeds so far."""
    context = multiprocessing.get_context("spawn")
    deeds = {name: Deeds() for name in names}
    with ExitStack() as stack:
        for name in names:
            process = context.Process(target=_run, args=(name, targets, deeds[name]), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        yield deeds


def _run(name: str, targets: Targets, deeds: Deeds) -> None:
    os.nice(_LOWEST_PRIORITY)
    ATTACKS[name](targets, deeds)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=5.0) as sock:
        yield sock


def in_threads(deeds: Any) -> None:
    """Repeat each of `deeds` forever in its own thread; ignore I/O and HTTP errors."""

    def go_on(deed: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(OSError, httpx.HTTPError):
                deed()
            time.sleep(_AGAIN_S)

    all_deeds = list(deeds)
    with ThreadPoolExecutor(len(all_deeds)) as pool:
        list(pool.map(go_on, all_deeds))

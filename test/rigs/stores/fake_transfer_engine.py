"""Mooncake's Transfer Engine without a transport: calls on record, answers on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators import peer as peer_module
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, BlockOutcome
from sglang.srt.environ import envs

BASE = 1 << 20
"""Address of the registered memory, 64 MiB."""


@dataclass(frozen=True)
class FakeCall:
    """One batch that reached the library."""

    op: str
    peer: str
    requests: list[tuple[int, int, int]]
    """(local address, the peer's address, bytes)."""


@dataclass
class FakeTransferEngines:
    """All engine objects that were made, and their behaviour. Any thread.

    `new_engine` replaces the constructor of engine objects.
    """

    initialize_code: int = 0
    initialize_errors: list[str] = field(default_factory=list)
    """Errors of the next calls of `initialize`, the next one last."""
    register_code: int = 0
    answer: Callable[[FakeTransferEngine, FakeCall], int] = lambda engine, call: 0
    """Returns the result of a batch; may block."""
    made: list[FakeTransferEngine] = field(default_factory=list)
    calls: list[FakeCall] = field(default_factory=list)
    """Batches that are not empty, in their order."""
    contacts: list[str] = field(default_factory=list)
    """Peers that were connected to without a transfer."""

    def new_engine(self) -> FakeTransferEngine:
        """Make one more engine object."""
        engine = FakeTransferEngine(self, 15000 + len(self.made))
        self.made.append(engine)
        return engine


class FakeTransferEngine:
    """One engine object."""

    def __init__(self, all_of_them: FakeTransferEngines, port: int) -> None:
        self._all = all_of_them
        self._port = port
        self.initialized: list[tuple[str, str, str, str]] = []
        self.forced: list[str] = []
        """Mooncake's environment variables that were set when the engine was initialized."""
        self.registered: dict[int, int] = {}

    def initialize(self, local_name: str, metadata: str, protocol: str, device: str) -> int:
        self.initialized.append((local_name, metadata, protocol, device))
        variables = (
            envs.MC_FORCE_TCP,
            envs.MC_FORCE_MNNVL,
            envs.MC_INTRANODE_NVLINK,
            envs.USE_BAREX,
        )
        self.forced = [variable.name for variable in variables if variable.is_set()]
        if self._all.initialize_errors:
            raise RuntimeError(self._all.initialize_errors.pop())
        return self._all.initialize_code

    def get_rpc_port(self) -> int:
        return self._port

    def batch_register_memory(self, ptrs: list[int], lengths: list[int]) -> int:
        if self._all.register_code == 0:
            self.registered |= dict(zip(ptrs, lengths, strict=True))
        return self._all.register_code

    def unregister_memory(self, ptr: int) -> int:
        return 0 if self.registered.pop(ptr, 0) else -1

    def batch_transfer_sync_write(
        self, peer: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        return self._transfer("write", peer, buffers, peer_buffers, lengths)

    def batch_transfer_sync_read(
        self, peer: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        return self._transfer("read", peer, buffers, peer_buffers, lengths)

    def _transfer(
        self, op: str, peer: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        call = FakeCall(op, peer, list(zip(buffers, peer_buffers, lengths, strict=True)))
        if call.requests:
            self._all.calls.append(call)
        else:
            self._all.contacts.append(peer)
        return self._all.answer(self, call)


class LaterClock:
    """The clock of a peer: real time plus `ahead` seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        patch.setattr(peer_module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def listening_peer() -> Iterator[str]:
    """The session id of a peer that accepts connections, and does no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def start_engine(fakes: FakeTransferEngines) -> MooncakeTransferEngine:
    """An engine over TCP with 64 MiB at `BASE` registered."""
    engine = MooncakeTransferEngine(
        "127.0.0.1", new_engine=fakes.new_engine, supported=("tcp",), rdma_root=Path("/nowhere")
    )
    engine.register(BASE, 64 * MIB)
    return engine


def start_over_rdma(
    fakes: FakeTransferEngines, root: Path, patch: pytest.MonkeyPatch
) -> MooncakeTransferEngine:
    """An engine as of `start_engine`, over a made-up RDMA device below `root`."""
    (root / "mlx5_0").mkdir()
    patch.setenv("MOONCAKE_PROTOCOL", "rdma")
    engine = MooncakeTransferEngine(
        "127.0.0.1", new_engine=fakes.new_engine, supported=("rdma",), rdma_root=root
    )
    engine.register(BASE, 64 * MIB)
    return engine


def apart(count: int, length: int = 10, gap: int = 20) -> list[Block]:
    """Blocks that do not touch, from `BASE` on."""
    return [Block(BASE + i * gap, 1000 + i * gap, length) for i in range(count)]


def statuses(outcomes: list[BlockOutcome]) -> str:
    """Outcomes of blocks in one line."""
    return " ".join(outcome.value for outcome in outcomes)


class Hanging:
    """Batches that return when they are told to."""

    def __init__(self, code: int = 0, *, contacts: bool = False) -> None:
        self.go_on, self.entered = threading.Event(), threading.Event()
        self._code, self._contacts = code, contacts

    def __call__(self, engine: FakeTransferEngine, call: FakeCall) -> int:
        if bool(call.requests) == self._contacts:
            return 0
        self.entered.set()
        assert self.go_on.wait(30)
        return self._code

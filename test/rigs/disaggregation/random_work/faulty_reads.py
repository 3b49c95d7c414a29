"""Reads that hang, fail and damage bytes, within this process or over NIXL."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final, Protocol

from rigs.disaggregation.pd_rig import LocalMover, RigEngine
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.distributed.device_communicators import nixl_transfer_engine
from sglang.srt.distributed.device_communicators.nixl_library import (
    NixlAgent,
    RemoteFailed,
    export_ucx_settings,
    load_nixl,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Request,
    Transfer,
    TransferError,
    TransferOp,
)

_FLIPS: Final = 0.1
"""Share of the reads that flip a bit, while there are faults."""
_STALLED_AFTER_S: Final = 0.1
"""NIXL's time for a read that hangs, while there are faults."""


class FaultyReads(Protocol):
    """Faults of both servers' reads. `hold`, `fails`, `begun` and `release` are those of
    `LocalMover`."""

    hold: bool
    fails: Callable[[Sequence[Block]], TransferError | None]
    begun: list[Transfer]

    def release(self) -> None: ...

    def set_faults(self, has_faults: bool) -> None:
        """Let bits flip and hanging reads end from now on, or no more."""

    def new_engine(self) -> RigEngine:
        """An engine for a server."""

    def close(self) -> None:
        """End the engines. No read is in flight."""


class LocalReads(LocalMover):
    """Faulty reads within this process: one engine for all."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._flips = False

    def set_faults(self, has_faults: bool) -> None:
        self._flips = has_faults

    def new_engine(self) -> RigEngine:
        return self

    def close(self) -> None:
        pass

    def move(self, peer: str, blocks: Sequence[Block]) -> None:
        super().move(peer, blocks)
        if self._flips:
            maybe_flip(self._rng, blocks)


class NixlReads:
    """Faulty reads over NIXL. Each server has an engine; its agents hang and fail by injection, so
    that the engine ends and connects them while other reads go on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.hold = self.flips = False
        self.fails: Callable[[Sequence[Block]], TransferError | None] = lambda blocks: None
        self.begun: list[Transfer] = []
        self.num_releases = 0
        self._library = load_nixl()
        export_ucx_settings(LOOPBACK, None)
        self._stalled_after_s = nixl_transfer_engine.STALLED_AFTER_S
        self._engines: list[_Engine] = []

    def release(self) -> None:
        self.hold = False
        self.num_releases += 1

    def set_faults(self, has_faults: bool) -> None:
        self.flips = has_faults
        seconds = _STALLED_AFTER_S if has_faults else self._stalled_after_s
        nixl_transfer_engine.STALLED_AFTER_S = seconds  # type: ignore[misc]

    def new_engine(self) -> RigEngine:
        engine = _Engine(self, self._library)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        self.set_faults(False)
        for engine in self._engines:
            engine.close()


class _Engine(NixlTransferEngine):
    def __init__(self, reads: NixlReads, library: ModuleType) -> None:
        super().__init__(LOOPBACK, make_agent=lambda name: _Agent(reads, library, name))
        self._reads = reads

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        transfer = super().begin(peer, op, blocks, timeout=timeout)
        self._reads.begun.append(transfer)
        return transfer


class _Agent(NixlAgent):
    """An agent whose reads begin late. Bytes of a read that was given up arrive at its end, which
    is the last moment that NIXL has for them."""

    def __init__(self, faults: NixlReads, library: ModuleType, name: str) -> None:
        super().__init__(library, name)
        self._faults = faults
        self._waiting: dict[int, tuple[int, str, Sequence[Request]]] = {}
        """Reads that have not begun, each with the number of releases at its time."""
        self._begun: dict[int, tuple[int, Sequence[Request]]] = {}
        self._numbers = itertools.count()

    def connect(self, metadata: bytes) -> str:
        self._maybe_fail(())
        return super().connect(metadata)

    def begin_read(self, peer: str, requests: Sequence[Request]) -> int:
        number = next(self._numbers)
        faults = self._faults
        since = faults.num_releases if faults.hold else faults.num_releases - 1
        self._waiting[number] = since, peer, requests
        return number

    def is_read(self, number: int) -> bool:
        if number in self._waiting:
            since, peer, requests = self._waiting[number]
            if since == self._faults.num_releases:
                return False
            self._maybe_fail(requests)
            self._begun[number] = super().begin_read(peer, requests), requests
            del self._waiting[number]
        own, requests = self._begun[number]
        if not super().is_read(own):
            return False
        del self._begun[number]
        if self._faults.flips:
            maybe_flip(self._faults.rng, requests)
        return True

    def end(self) -> None:
        left = [requests for _, _, requests in self._waiting.values()]
        left += [requests for _, requests in self._begun.values()]
        in_flight = {
            block.local
            for transfer in list(self._faults.begun)
            for block in (() if transfer.is_settled else transfer.blocks)
        }
        for requests in left:
            assert requests[0].local in in_flight, "its memory is free before its agent has ended"
        for _, peer, requests in self._waiting.values():
            super().begin_read(peer, requests)
        super().end()

    def _maybe_fail(self, requests: Sequence[Request]) -> None:
        blocks = [Block(one.local, one.remote, one.length) for one in requests]
        if (error := self._faults.fails(blocks)) is not None:
            raise RemoteFailed(str(error))


def maybe_flip(rng: random.Random, read: Sequence[Block | Request]) -> None:
    """Flip a bit of some reads."""
    if rng.random() < _FLIPS:
        one = rng.choice(read)
        at = one.local + rng.randrange(one.length)
        ctypes.c_uint8.from_address(at).value ^= 1 << rng.randrange(8)

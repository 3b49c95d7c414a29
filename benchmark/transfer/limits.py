"""Users of Mooncake's transport that share its limit of slices in flight, over TCP on loopback.

One peer process has a Transfer Engine and lends memory to a store. Each case and number of slices
has its own process, because the limit breaks connections. All users in the process move that many
slices in one call, again and again, at the same time. Users share a limit if they fail together but
not alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmark.command import Command
from benchmark.report import Report
from benchmark.transfer import limits_peer
from benchmark.transfer.limits_peer import METADATA, PEER_BYTES
from sglang.embedded_mooncake import LOOPBACK, ManagedProcess, MooncakeMaster
from sglang.srt.constants import KIB, MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    load_mooncake,
    load_transfer_engine,
)
from sglang.srt.environ import envs

SLICE_BYTES: Final = 16 * KIB
OBJECT_SLICES: Final = 64
SECONDS: Final = 4.0
_CALL_S: Final = 120.0
"""Seconds after which a call that has not returned counts as one that hangs."""
CASES: Final[dict[str, tuple[str, ...]]] = {
    "an engine": ("engine",),
    "an engine from two threads": ("engine", "same"),
    "two engines": ("engine", "engine"),
    "a store client": ("store",),
    "a store client from two threads": ("store", "same"),
    "an engine and a store client": ("engine", "store"),
}
"""The users of one process; `same`: the one before, from another thread."""


class EngineUser:
    """An engine object that writes to the peer's memory, each thread to a part of its own."""

    def __init__(self, peer: dict[str, Any], slices: int) -> None:
        self._engine = load_transfer_engine().TransferEngine()
        assert self._engine.initialize(LOOPBACK, METADATA, "tcp", "") == 0
        self._memory = np.random.default_rng(0).integers(
            0, 256, slices * SLICE_BYTES, dtype=np.uint8
        )
        address = self._memory.ctypes.data
        assert self._engine.batch_register_memory([address], [self._memory.nbytes]) == 0
        self._peer, self._slices = peer, slices

    def move(self, part: int) -> bool:
        """One call; whether it succeeded."""
        offsets = range(0, self._slices * SLICE_BYTES, SLICE_BYTES)
        there = self._peer["address"] + part * PEER_BYTES // 2
        code: int = self._engine.batch_transfer_sync_write(
            self._peer["session"],
            [self._memory.ctypes.data + offset for offset in offsets],
            [there + offset for offset in offsets],
            [SLICE_BYTES] * self._slices,
        )
        return code == 0


class StoreUser:
    """A store client that puts objects to the peer's segment, gets them and removes them."""

    def __init__(self, peer: dict[str, Any], slices: int) -> None:
        self._store = load_mooncake().MooncakeDistributedStore()
        code = self._store.setup(LOOPBACK, METADATA, 0, 16 * MIB, "tcp", "", peer["master"])
        assert code == 0
        self._memory = np.random.default_rng(0).integers(
            0, 256, slices * SLICE_BYTES, dtype=np.uint8
        )
        assert self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0
        self._objects = slices // OBJECT_SLICES
        self._count = [0, 0]

    def move(self, part: int) -> bool:
        """One put of all slices and one get; whether both succeeded."""
        self._count[part] += 1
        keys = [f"{os.getpid()}-{part}-{self._count[part]}-{n}" for n in range(self._objects)]
        starts = range(0, self._objects * OBJECT_SLICES * SLICE_BYTES, SLICE_BYTES)
        pointers = [self._memory.ctypes.data + start for start in starts]
        per_object = [
            pointers[n * OBJECT_SLICES : (n + 1) * OBJECT_SLICES] for n in range(self._objects)
        ]
        sizes = [[SLICE_BYTES] * OBJECT_SLICES] * self._objects
        put = self._store.batch_put_from_multi_buffers(keys, per_object, sizes)
        got = self._store.batch_get_into_multi_buffers(keys, per_object, sizes)
        for key in keys:
            self._store.remove(key, True)
        return not any(put) and all(code > 0 for code in got)


USERS: Final[dict[str, Callable[[dict[str, Any], int], EngineUser | StoreUser]]] = {
    "engine": EngineUser,
    "store": StoreUser,
}


def run_case(peer: dict[str, Any], kinds: tuple[str, ...], slices: int, out: Connection) -> None:
    """Run a case in this process, and send a record of what each thread saw."""
    users: list[EngineUser | StoreUser] = []
    for kind in kinds:
        users.append(users[-1] if kind == "same" else USERS[kind](peer, slices))
    calls, failed = [0] * len(users), [0] * len(users)

    def use(part: int) -> None:
        end = time.monotonic() + SECONDS
        # A user ends with its first failure: some leave a connection on which calls hang.
        while time.monotonic() < end and not failed[part]:
            calls[part] += 1
            failed[part] += not users[part].move(part)

    threads = [threading.Thread(target=use, args=(part,)) for part in range(len(users))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = [c.raddr.port for c in psutil.Process().net_connections() if c.raddr]
    connections = sum(port not in peer["control_ports"] for port in ports)
    out.send({"calls": calls, "failed": failed, "connections": connections})
    os._exit(0)  # Mooncake's threads may hang.


class Peer(ManagedProcess):
    """A process with an engine, and a segment of the store."""

    def __init__(self, master: MooncakeMaster, folder: Path) -> None:
        self.master = master
        self._facts = folder / "facts.json"
        command = [sys.executable, limits_peer.__file__, str(self._facts), master.address]
        super().__init__("peer", command, ready=self._facts.exists, log_dir=folder)

    def facts(self) -> dict[str, Any]:
        """Process id, addresses and session of the peer."""
        ports = [self.master.rpc_port, self.master.metrics_port]
        read: dict[str, Any] = json.loads(self._facts.read_text())
        return {**read, "pid": self.pid, "master": self.master.address, "control_ports": ports}


def run_beside_peer(
    case: Callable[..., None], *arguments: Any, limit_s: float | None = None
) -> dict[str, Any] | None:
    """Run `case(facts of the peer, *arguments, connection)` in a process of its own, beside a peer
    of its own. Returns what it has sent; None: nothing within `limit_s` seconds."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="transport-") as folder:
        master = MooncakeMaster(Path(folder))
        peer = Peer(master, Path(folder))
        try:
            master.start()
            peer.start()
            here, there = spawn.Pipe(duplex=False)
            user = spawn.Process(target=case, args=(peer.facts(), *arguments, there))
            user.start()
            there.close()
            record: dict[str, Any] | None = here.recv() if here.poll(limit_s) else None
            user.kill()
            user.join()
        finally:
            peer.kill()
            master.kill()
    return record


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slices", type=int, nargs="+", default=[1024, 2000, 3072])
    parser.add_argument("--users", nargs="+", choices=CASES, default=list(CASES))


def run(args: argparse.Namespace, report: Report) -> None:
    envs.MC_FORCE_TCP.set("1")
    for name in args.users:
        for slices in args.slices:
            case = {"users": name, "slices": slices}
            record = run_beside_peer(run_case, CASES[name], slices, limit_s=_CALL_S)
            report.add("hangs", record is None, "yes or no", case)
            if record is not None:
                report.add("calls", sum(record["calls"]), "count", case, of_users=record["calls"])
                failed = record["failed"]
                report.add("failed_calls", sum(failed), "count", case, of_users=failed)
                report.add("connections", record["connections"], "count", case)


_QUICK: Final = {"slices": [64], "users": ["an engine"]}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)

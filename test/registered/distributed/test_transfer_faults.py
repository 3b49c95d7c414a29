"""Peers that stop, end, come back as another process, or have a broken connection (real processes).

Callers return by their deadline; what is in flight is told and kept; nothing leaks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rigs.stores.tcp_forwarder import TcpForwarder
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import MIB
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    BlockOutcome,
    PeerError,
    PeerStalled,
    PeerUnreachable,
    RangeInUse,
    Transfer,
    TransferOp,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=29, suite="base-b-test-cpu")

SIZE = 32 * MIB
BLOCK = 64 * 1024
PROGRESS_S = 7
"""Seconds without a byte after which the transport ends a transfer. A machine may pause for some of
them while a caller gives up."""
SOON = 1.0
"""A caller's patience: enough to begin on a busy machine, and short of `PROGRESS_S`."""
LONG = 60.0
READ, WRITE = TransferOp.READ, TransferOp.WRITE


class Here:
    """This process's end, with its memory."""

    def __init__(self) -> None:
        self.engine = MooncakeTransferEngine(LOOPBACK)
        self.memory = np.zeros(SIZE, np.uint8)
        self.engine.register(self.memory.ctypes.data, SIZE)

    def move(
        self,
        op: TransferOp,
        peer: TransferPeer,
        *,
        timeout: float,
        blocks: int = 256,
        via: str | None = None,
    ) -> Transfer:
        """Blocks that do not touch, from the memories' start."""
        local, remote = self.memory.ctypes.data, peer.address
        step = 2 * BLOCK
        wanted = [Block(local + i * step, remote + i * step, BLOCK) for i in range(blocks)]
        return self.engine.transfer(via or peer.session_id, op, wanted, timeout=timeout)

    def settles(self) -> bool:
        """True if within a while no call is under way and no budget is held."""

        def is_idle() -> bool:
            facts = self.engine.describe()
            return not facts["transfers_under_way"] and not any(
                facts["requests_in_flight"].values()
            )

        return wait_until(is_idle, 30)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    for field in (envs.MC_TCP_PROGRESS_TIMEOUT_SEC, envs.MC_TCP_STATUS_TIMEOUT_SEC):
        monkeypatch.setenv(field.name, str(PROGRESS_S))


@pytest.fixture
def here() -> Iterator[Here]:
    mark_device_set(detect_device())
    made = Here()
    yield made
    made.engine.close()


@pytest.fixture
def peer() -> Iterator[TransferPeer]:
    with TransferPeer(SIZE) as running:
        yield running


@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_stopped_peer_holds_no_caller(here: Here, peer: TransferPeer, op: TransferOp) -> None:
    assert here.move(WRITE, peer, timeout=LONG).is_done
    here.memory[:] = 0xA5
    peer.suspend()
    transfer = here.move(op, peer, timeout=SOON)
    assert transfer.in_flight == list(range(256)), "the caller was let go meanwhile"
    with pytest.raises(RangeInUse):
        here.engine.deregister(here.memory.ctypes.data)
    assert transfer.wait(LONG), "the transport ends what makes no progress"
    assert isinstance(transfer.error, PeerStalled)
    assert BlockOutcome.IN_FLIGHT not in transfer.outcomes
    assert here.settles()

    # Its memory is free now: nothing comes late, and nothing was kept of it.
    here.memory[:] = 0x5A
    peer.resume()
    assert here.move(WRITE, peer, timeout=LONG, blocks=1).is_done
    assert (here.memory == 0x5A).all()
    here.engine.deregister(here.memory.ctypes.data)


def test_a_peer_stopped_at_first_contact_holds_no_other(here: Here, peer: TransferPeer) -> None:
    """Mooncake waits for its answer without bound: neither the caller nor another does."""
    peer.suspend()
    for _ in range(3):
        transfer = here.move(WRITE, peer, timeout=0.2)
        assert transfer.is_settled
        assert set(transfer.outcomes) == {BlockOutcome.NOT_SENT}
    with TransferPeer(SIZE) as other:
        assert here.move(WRITE, other, timeout=LONG).is_done
    peer.resume()
    assert here.settles()
    assert here.move(WRITE, peer, timeout=LONG).is_done


def test_one_stopped_peer_holds_up_no_other(here: Here, peer: TransferPeer) -> None:
    with TransferPeer(SIZE) as other:
        for each in (peer, other):
            assert here.move(WRITE, each, timeout=LONG).is_done
        peer.suspend()
        hanging = here.move(READ, peer, timeout=SOON)
        for _ in range(5):
            assert here.move(READ, other, timeout=LONG).is_done
        assert not hanging.is_settled, "or this test showed nothing"
        peer.kill()
        assert hanging.wait(LONG)
        assert here.move(READ, other, timeout=LONG).is_done
    assert here.settles()


def test_a_killed_peer_fails_the_transfer(here: Here, peer: TransferPeer) -> None:
    assert here.move(WRITE, peer, timeout=LONG).is_done
    peer.kill()
    for _ in range(3):
        with pytest.raises(PeerUnreachable, match=peer.session_id):
            here.move(WRITE, peer, timeout=LONG)
    assert here.settles()


def test_a_peer_killed_in_the_middle_ends_all_calls(here: Here, peer: TransferPeer) -> None:
    assert here.move(WRITE, peer, timeout=LONG).is_done
    errors: list[PeerError] = []
    under_way = threading.Event()

    def work() -> None:
        try:
            while True:
                here.move(READ, peer, timeout=LONG)
                under_way.set()
        except PeerError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert under_way.wait(LONG)
    peer.kill()
    for thread in threads:
        thread.join(LONG)
    assert len(errors) == 3
    assert here.settles()


def test_a_peer_may_be_replaced_at_its_address(here: Here) -> None:
    with (
        TransferPeer(SIZE) as old,
        TransferPeer(SIZE) as new,
        TcpForwarder(old.session_id) as address,
    ):
        assert here.move(WRITE, old, timeout=LONG, via=address.address).is_done
        old.kill()
        address.target = new.session_id
        here.memory[:] = 3
        assert here.move(WRITE, new, timeout=LONG, via=address.address).is_done
        here.memory[:] = 0
        assert here.move(READ, new, timeout=LONG, via=address.address).is_done
        assert here.memory[0] == here.memory[2 * BLOCK] == 3
        assert here.settles()


def test_calls_succeed_after_a_poisoned_connection(here: Here, peer: TransferPeer) -> None:
    """Some 2,500 requests at once break a connection of Mooncake's for good before 0.3.14. Calls of
    ours succeed after it; `test_a_broken_connection_is_replaced` has the case without a network."""
    assert here.move(WRITE, peer, timeout=LONG).is_done
    raw: Any = here.engine._peers.of(peer.session_id).connect(None)
    local, remote = here.memory.ctypes.data, peer.address

    def write(count: int) -> int:
        """Past our budget and our checks."""
        parts = [i * 1024 for i in range(count)]
        arguments = ([local + i for i in parts], [remote + i for i in parts], [512] * count)
        return int(raw.raw.batch_transfer_sync_write(peer.session_id, *arguments))

    is_broken = any(write(count) and write(1) for count in (3000, 6000, 12000))
    assert is_broken or hasattr(raw.raw, "submit_scatter_read"), "a release before 0.3.14 breaks"
    for _ in range(2):
        assert here.move(WRITE, peer, timeout=LONG).is_done
    assert here.settles()


def test_nothing_piles_up(here: Here) -> None:
    """Six peers that come and go: no thread, no engine object and no budget is theirs for good."""

    def transfer_threads() -> int:
        return sum(thread.name == "mooncake-transfer" for thread in threading.enumerate())

    before = transfer_threads()
    for index in range(6):
        with TransferPeer(SIZE) as peer:
            assert here.move(WRITE, peer, timeout=LONG, blocks=4).is_done
            if index % 2:
                peer.kill()
                with pytest.raises(PeerUnreachable):
                    here.move(WRITE, peer, timeout=LONG, blocks=4)
            here.engine.forget_peer(peer.session_id)
    assert here.settles()
    facts = here.engine.describe()
    assert facts["requests_in_flight"] == {}
    assert facts["engine_objects"] <= 1 + 4, "one of this process, and spare ones"
    assert transfer_threads() <= before + 2
    here.engine.deregister(here.memory.ctypes.data)


def test_servers_that_end_while_idle_do_not_pile_up(here: Here) -> None:
    """Six prefill servers, each killed after one read: a decode server keeps what it needs for the
    last one, and forgets that one at the next failure."""

    def engine_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    sessions = Sessions(here.engine)

    def is_only(name: str) -> bool:
        """True if no other session is known, and no probe is under way."""
        if any(thread.name == "disagg-sessions" for thread in threading.enumerate()):
            return False
        if sessions.known != [name]:
            # A stranger may have listened at the last one's port.
            sessions.probe()
            return False
        return True

    with_one_peer = 0
    for index in range(6):
        with TransferPeer(SIZE) as peer:
            name = peer.session_id
            sessions.enter(name, f"instance {index}", f"tcp://{name}")
            assert here.move(READ, peer, timeout=LONG, blocks=4).is_done
            assert wait_until(lambda name=name: is_only(name), 30)  # type: ignore[misc]
            sessions.leave(name)
            peer.kill()
            with_one_peer = with_one_peer or engine_threads()
    assert sessions.known == [name]
    assert here.engine.describe()["engine_objects"] <= 3
    # One peer needs two engine objects of three threads each, and an idle third may be kept. If the
    # servers' objects stayed, there would be five more. An object takes a second to end.
    assert wait_until(lambda: engine_threads() <= with_one_peer + 3 + 2, 30)
    sessions.probe()
    assert wait_until(lambda: not sessions.known, 30)
    assert here.engine.describe()["requests_in_flight"] == {}

"""Reasons of transfers that fail: batches that cannot be ended, and calls that take long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.stores.fake_transfer_engine import (
    BASE,
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    Hanging,
    LaterClock,
    apart,
    listening_peer,
    start_over_rdma,
    statuses,
)
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators import peer as peer_module
from sglang.srt.distributed.device_communicators.engine_pool import PooledEngine
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.peer import (
    STALLED_AFTER_S,
    CallFailed,
    ConnectionGone,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BATCH_BYTES,
    Block,
    BlockOutcome,
    PeerStalled,
    PeerUnreachable,
    RangeInUse,
    TransferOp,
)
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

STALL_S = 12.0
"""Seconds of a call that took longer than the transport waits for progress."""


def slow_failure(clock: LaterClock) -> Callable[[FakeTransferEngine, FakeCall], int]:
    """Answers of calls that fail after `STALL_S` seconds."""

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        clock.ahead += STALL_S if call.requests else 0.0
        return -len(call.requests)

    return answer


# ---- batches that cannot be ended --------------------------------------------------------------


def test_what_a_failed_batch_left_keeps_its_memory_where_it_cannot_be_ended(
    fakes: FakeTransferEngines,
    peer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All peers share the engine object over rdma. Its budget is free again: this peer has an
    engine object of its own from then on, and what failed there can be ended."""
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    refused = 1000 + 20 * 3

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        return -1 if refused in {there for _, there, _ in call.requests} else 0

    fakes.answer = answer
    transfer = engine.begin(peer, TransferOp.READ, apart(512), timeout=30)
    assert not transfer.wait(60) and transfer.is_left
    assert transfer.in_flight == list(range(512))
    assert str(transfer.error) == (
        f"peer {peer} failed a batch of 512 requests (code -1 after 0 s): it refuses an address, "
        "or broke the connection"
    )
    assert f"512 blocks stay in flight with peer {peer}" in caplog.text
    assert wait_until(lambda: engine.describe()["requests_in_flight"] == {peer: 0}, 30)
    # All of the budget is there for a second transfer, which tells the refused block.
    again = engine.transfer(peer, TransferOp.READ, apart(1024), timeout=30)
    assert [i for i, o in enumerate(again.outcomes) if o is BlockOutcome.FAILED] == [3]
    assert again.outcomes.count(BlockOutcome.DONE) == 1023
    assert len(fakes.made) == 3, "the shared one, and two of which the batch broke one"
    assert transfer.in_flight == list(range(512))
    with pytest.raises(RangeInUse):
        engine.deregister(BASE)


@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "late"])
def test_an_ended_peer_leaves_its_batch_in_flight(
    fakes: FakeTransferEngines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_slow: bool,
) -> None:
    clock = LaterClock(monkeypatch)
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    with contextlib.ExitStack() as life:
        name = life.enter_context(listening_peer())

        def answer(_: FakeTransferEngine, call: FakeCall) -> int:
            if call.requests:
                life.close()
                clock.ahead += STALL_S * is_slow
            return -len(call.requests)

        fakes.answer = answer
        transfer = engine.begin(name, TransferOp.READ, apart(2), timeout=30)
        assert not transfer.wait(60)
        assert isinstance(transfer.error, PeerUnreachable)
        assert str(transfer.error) == f"peer {name} ended during a transfer"
        assert transfer.in_flight == [0, 1]
        with pytest.raises(PeerUnreachable):
            engine.transfer(name, TransferOp.READ, apart(2), timeout=30)


def test_a_stalled_batch_keeps_its_ranges(
    fakes: FakeTransferEngines, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LaterClock(monkeypatch)
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    fakes.answer = slow_failure(clock)
    with pytest.raises(PeerStalled, match="moved nothing for 12 s"):
        engine.transfer(peer, TransferOp.READ, apart(2), timeout=30)
    with pytest.raises(RangeInUse):
        engine.deregister(BASE)


def test_calls_under_way_are_no_longer_begun_over_an_engine_that_was_given_up(
    fakes: FakeTransferEngines, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed call holds no budget of that engine."""
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    remote = engine._peers.of(peer)
    home = remote.connect(None)
    assert home is not None and home.is_home
    assert not remote.retire(home, CallFailed(-1, 0.0, 2))
    with pytest.raises(ConnectionGone):
        remote.call(home, TransferOp.WRITE, [])
    assert not home.ended.is_set()


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_transfer_survives_an_engine_given_up(
    fakes: FakeTransferEngines,
    peer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_before: bool,
) -> None:
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    remote, home, take = engine._peers.of(peer), engine._pool.home, engine._pool.take

    def give_up() -> None:
        remote.retire(home, CallFailed(-1, 0.0, 2))

    def late(name: str) -> PooledEngine:
        taken = take(name)
        give_up()
        return taken

    def answer(at: FakeTransferEngine, call: FakeCall) -> int:
        if at is home.raw:
            give_up()
        return 0

    if is_before:
        monkeypatch.setattr(engine._pool, "take", late)
    else:
        fakes.answer = answer
    assert engine.transfer(peer, TransferOp.WRITE, apart(2), timeout=30).is_done
    assert engine.describe()["engine_objects"] == 2


# ---- long calls --------------------------------------------------------------------------------


def test_a_peer_that_moves_three_megabytes_a_second_does_not_hang(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second room's transfer, while a call of 256 MiB takes 89 s."""
    clock = LaterClock(monkeypatch)
    engine.register(1 << 40, BATCH_BYTES)
    hanging = Hanging()
    fakes.answer = lambda at, call: hanging(at, call) if len(fakes.calls) == 1 else 0
    whole = [Block(1 << 40, 1000, BATCH_BYTES)]
    first = engine.begin(peer, TransferOp.READ, whole, timeout=None)
    assert hanging.entered.wait(30)
    clock.ahead = BATCH_BYTES / 3e6
    assert engine.transfer(peer, TransferOp.READ, apart(1), timeout=None).is_done
    clock.ahead += BATCH_BYTES / 3e6 + STALLED_AFTER_S + 10
    with pytest.raises(PeerStalled, match="has not answered a call for"):
        engine.transfer(peer, TransferOp.READ, apart(1), timeout=None)
    hanging.go_on.set()
    assert first.wait(30) and first.is_done


def test_a_long_call_tells_a_killed_peer(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LaterClock(monkeypatch)
    with contextlib.ExitStack() as life:
        name = life.enter_context(listening_peer())
        fails = slow_failure(clock)

        def answer(at: FakeTransferEngine, call: FakeCall) -> int:
            if call.requests:
                life.close()
            return fails(at, call)

        fakes.answer = answer
        with pytest.raises(PeerUnreachable, match="ended during a transfer"):
            engine.transfer(name, TransferOp.READ, apart(2), timeout=30)
    engine.deregister(BASE)


def test_a_long_call_tells_a_refused_block(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call moved bytes for 12 s, so it has not stalled: the peer answers."""
    clock = LaterClock(monkeypatch)

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        clock.ahead += STALL_S if len(call.requests) > 1 else 0.0
        return -1 if 1000 + 20 * 2 in {there for _, there, _ in call.requests} else 0

    fakes.answer = answer
    transfer = engine.transfer(peer, TransferOp.READ, apart(4), timeout=None)
    assert statuses(transfer.outcomes) == "done done failed done"


def test_a_long_call_tells_a_stopped_peer(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is stopped. Transfers go on when the peer does."""
    monkeypatch.setattr(peer_module, "_ANSWER_S", 0.1)
    clock = LaterClock(monkeypatch)
    assert engine.transfer(peer, TransferOp.READ, apart(1), timeout=30).is_done
    stopped, fails = Hanging(contacts=True), slow_failure(clock)
    fakes.answer = lambda at, call: fails(at, call) if call.requests else stopped(at, call)
    with pytest.raises(PeerStalled, match="moved nothing for 12 s"):
        engine.transfer(peer, TransferOp.READ, apart(2), timeout=None)
    engine.deregister(BASE)
    engine.register(BASE, 64 * MIB)
    fakes.answer = lambda _, call: 0
    stopped.go_on.set()
    assert engine.transfer(peer, TransferOp.READ, apart(2), timeout=30).is_done

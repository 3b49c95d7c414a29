"""Transfers that fail: connections that break, peers that hang or are gone, what is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.servers.scarce_threads import no_threads
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
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.peer import (
    STALLED_AFTER_S,
    CallFailed,
    ConnectionGone,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    BlockOutcome,
    PeerStalled,
    PeerUnreachable,
    RangeInUse,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


@contextlib.contextmanager
def calling(engine: MooncakeTransferEngine, peer: str) -> Iterator[list[Transfer]]:
    """A transfer of one block in another thread, which has ended when the block has."""
    ended: list[Transfer] = []

    def call() -> None:
        ended.append(engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=None))

    thread = threading.Thread(target=call)
    thread.start()
    yield ended
    thread.join(30)


def test_a_broken_connection_is_replaced(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    """For example after too large a batch: later ones fail until the engine object is gone."""
    engine.transfer(peer, TransferOp.WRITE, apart(2), timeout=30)
    poisoned = fakes.made[1]
    fakes.answer = lambda at, call: -1 if at is poisoned else 0
    assert engine.transfer(peer, TransferOp.WRITE, apart(2), timeout=30).is_done
    assert len(fakes.made) == 3
    assert fakes.made[2].registered == {BASE: 64 * MIB}
    assert engine.describe()["engine_objects"] == 2, "what is left of a failed batch ends with it"


def test_only_the_blocks_that_the_peer_refuses_fail(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    bad = {1000 + 20 * 3, 1000 + 20 * 90 + 10}

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        touched = {x for _, there, length in call.requests for x in range(there, there + length)}
        return -1 if bad & touched else 0

    fakes.answer = answer
    # Block 91 is the second half of a merged request.
    blocks = apart(91)
    blocks.append(Block(blocks[-1].local + 10, blocks[-1].remote + 10, 10))
    transfer = engine.transfer(peer, TransferOp.WRITE, blocks, timeout=30)
    failed = [i for i, o in enumerate(transfer.outcomes) if o is BlockOutcome.FAILED]
    assert failed == [3, 91]
    assert transfer.outcomes.count(BlockOutcome.DONE) == 90
    assert transfer.is_settled and not transfer.is_done


def test_a_missing_peer_gets_no_call(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine
) -> None:
    name = f"127.0.0.1:{get_free_port()}"
    with pytest.raises(PeerUnreachable, match=f"peer {name} accepts no connection"):
        engine.transfer(name, TransferOp.WRITE, apart(3), timeout=30)
    assert not fakes.calls and not fakes.contacts
    engine.deregister(BASE)


def test_an_ended_peer_is_unreachable(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine
) -> None:
    fakes.answer = lambda _, call: -1 if call.requests else 0
    with listening_peer() as name:
        assert statuses(engine.transfer(name, TransferOp.WRITE, apart(2), timeout=30).outcomes) == (
            "failed failed"
        )
    with pytest.raises(PeerUnreachable):
        engine.transfer(name, TransferOp.WRITE, apart(2), timeout=30)


@pytest.mark.parametrize(("code", "end"), [(0, "done"), (-1, "not sent")])
def test_what_hangs_stays_in_flight_until_it_returns(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str, code: int, end: str
) -> None:
    engine.transfer(peer, TransferOp.READ, apart(1), timeout=30)
    fakes.answer = hanging = Hanging(code)
    transfer = engine.begin(peer, TransferOp.READ, apart(600), timeout=None)
    assert hanging.entered.wait(30)
    transfer.abandon()  # As `engine.transfer` does when its time is up.
    assert not transfer.is_settled
    assert transfer.in_flight == list(range(512)), "the first batch is in the library"
    assert set(transfer.outcomes[512:]) == {BlockOutcome.NOT_SENT}
    with pytest.raises(RangeInUse):
        engine.deregister(BASE)
    facts = engine.describe()
    assert (facts["requests_in_flight"], facts["transfers_under_way"]) == ({peer: 512}, 1)
    hanging.go_on.set()
    assert transfer.wait(30)
    assert transfer.in_flight == []
    assert {outcome.value for outcome in transfer.outcomes[:512]} == {end}
    assert set(transfer.outcomes[512:]) == {BlockOutcome.NOT_SENT}, "it was abandoned"
    engine.deregister(BASE)
    assert wait_until(lambda: engine.describe()["requests_in_flight"] == {peer: 0}, 30)


def test_a_first_contact_that_hangs_has_nothing_in_flight(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    fakes.answer = hanging = Hanging(contacts=True)
    transfer = engine.transfer(peer, TransferOp.READ, apart(3), timeout=0.1)
    assert transfer.is_settled
    assert statuses(transfer.outcomes) == "not sent not sent not sent"
    assert engine.describe()["requests_in_flight"] == {peer: 0}
    engine.deregister(BASE)
    hanging.go_on.set()
    assert wait_until(lambda: engine.describe()["transfers_under_way"] == 0, 30)
    assert fakes.calls == []


def test_a_peer_that_hangs_holds_up_no_other(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    hanging = Hanging(contacts=True)
    fakes.answer = lambda at, call: hanging(at, call) if call.peer == peer else 0
    for _ in range(3):
        engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=0.01)
    with listening_peer() as other:
        assert engine.transfer(other, TransferOp.WRITE, apart(1), timeout=30).is_done
    engine.register(BASE * 1000, 10)
    hanging.go_on.set()


def test_calls_to_a_peer_that_hangs_do_not_pile_up(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = LaterClock(monkeypatch)
    fakes.answer = hanging = Hanging()
    with calling(engine, peer):
        assert hanging.entered.wait(30)
        clock.ahead = 2 * STALLED_AFTER_S
        for _ in range(3):
            with pytest.raises(
                PeerStalled, match=rf"peer {peer} has not answered a call for 4\d s"
            ):
                engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=None)
        assert len(fakes.calls) == 1
        hanging.go_on.set()
    assert wait_until(lambda: engine.describe()["transfers_under_way"] == 0, 30)
    assert engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30).is_done


def test_a_transfer_that_made_no_progress_is_the_peers_fault(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mooncake ended it, so nothing is in flight; the connection is not used again."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "0")
    fakes.answer = lambda _, call: -1 if call.requests else 0
    with pytest.raises(PeerStalled, match="moved nothing for 0 s"):
        engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
    engine.deregister(BASE)
    engine.register(BASE, 10)
    fakes.answer = lambda _, call: 0
    assert engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30).is_done
    assert len(fakes.made) == 3


def test_a_transfer_that_is_begun_tells_its_end(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    fakes.answer = hanging = Hanging()
    transfer = engine.begin(peer, TransferOp.READ, apart(2), timeout=10)
    assert hanging.entered.wait(10)
    assert (transfer.wait(0), transfer.in_flight, transfer.is_left) == (False, [0, 1], False)
    hanging.go_on.set()
    assert transfer.wait(10)
    assert (transfer.is_done, transfer.error, transfer.is_left) == (True, None, False)
    fakes.answer = lambda _, call: -1
    transfer = engine.begin(f"127.0.0.1:{get_free_port()}", TransferOp.READ, apart(1), timeout=10)
    assert transfer.wait(10)
    assert isinstance(transfer.error, PeerUnreachable)
    engine.deregister(BASE)


def test_a_library_that_raises_is_an_error_of_the_transfer(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    def fail(_: FakeTransferEngine, call: FakeCall) -> int:
        raise TypeError("incompatible function arguments")

    fakes.answer = fail
    with pytest.raises(TransferError, match="TypeError: incompatible"):
        engine.transfer(peer, TransferOp.READ, apart(2), timeout=30)
    fakes.answer = lambda _, call: 0
    assert engine.transfer(peer, TransferOp.READ, apart(2), timeout=30).is_done
    engine.deregister(BASE)


def test_a_peer_that_is_forgotten_is_connected_anew(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
    engine.forget_peer(peer)
    engine.forget_peer(peer)
    assert engine.describe()["requests_in_flight"] == {}
    engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
    assert fakes.contacts == [peer, peer]
    assert len(fakes.made) == 3, "its old address may be another process by now"


def test_engine_objects_do_not_pile_up(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    for _ in range(12):
        engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
        engine.forget_peer(peer)
    assert engine.describe()["engine_objects"] <= 1 + 4


def test_a_closed_engine_takes_no_calls(engine: MooncakeTransferEngine, peer: str) -> None:
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="was closed"):
        engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=1)


def test_over_rdma_peers_share_the_engine_until_one_breaks_it(
    fakes: FakeTransferEngines, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_over_rdma(fakes, tmp_path, monkeypatch)
    with listening_peer() as other:
        for name in (peer, other):
            engine.transfer(name, TransferOp.WRITE, apart(1), timeout=30)
        assert len(fakes.made) == 1
        home = fakes.made[0]
        fakes.answer = lambda at, call: -1 if at is home and call.peer == peer else 0
        for name in (peer, other):
            assert engine.transfer(name, TransferOp.WRITE, apart(1), timeout=30).is_done
    assert len(fakes.made) == 2
    assert engine.get_session_id() == "127.0.0.1:15000"
    engine.close()


def test_what_one_peer_left_serves_another(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
    engine.forget_peer(peer)
    with listening_peer() as other:
        engine.transfer(other, TransferOp.WRITE, apart(1), timeout=30)
    assert len(fakes.made) == 2


def test_a_peer_that_is_forgotten_gets_no_further_batch(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        if call.requests:
            engine.forget_peer(peer)
        return 0

    fakes.answer = answer
    with pytest.raises(PeerUnreachable, match="was forgotten by this process"):
        engine.transfer(peer, TransferOp.WRITE, apart(600), timeout=30)
    assert len(fakes.calls) == 1
    engine.deregister(BASE)


def test_a_connection_that_another_call_gave_up_is_made_anew(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the moment in which a call takes the connection and its beginning."""
    remote = engine._peers.of(peer)
    old = remote.connect(None)
    assert old is not None
    remote.retire(old, CallFailed(-1, 0.0, 2))
    assert old.ended.is_set()
    with pytest.raises(ConnectionGone):
        remote.call(old, TransferOp.WRITE, [])
    connections = iter((old, old, *[remote.connect(None)] * 3))
    monkeypatch.setattr(remote, "connect", lambda deadline: next(connections))
    assert engine.transfer(peer, TransferOp.WRITE, apart(2), timeout=30).is_done
    assert len(fakes.calls) == 1


def test_a_later_call_hides_no_hang(
    engine: MooncakeTransferEngine, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, now = engine._peers.of(peer), time.monotonic()
    calls = {1: (engine._pool.home, now - 2 * STALLED_AFTER_S, 0), 2: (engine._pool.home, now, 0)}
    monkeypatch.setattr(remote, "_calls", calls)
    with pytest.raises(PeerStalled, match="has not answered a call"):
        remote.check_moving()
    del calls[1]
    remote.check_moving()


def test_a_slow_peer_is_not_one_that_hangs(
    fakes: FakeTransferEngines,
    engine: MooncakeTransferEngine,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that succeed beside a long one show that it moves."""
    clock = LaterClock(monkeypatch)
    hanging = Hanging()
    fakes.answer = lambda at, call: hanging(at, call) if len(fakes.calls) == 1 else 0
    with calling(engine, peer) as ended:
        assert hanging.entered.wait(30)
        for _ in range(3):
            clock.ahead += STALLED_AFTER_S / 2
            assert engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=None).is_done
        assert not ended
        hanging.go_on.set()
    assert [transfer.is_done for transfer in ended] == [True]


# -- between two threads -------------------------------------------------------------------------


def test_a_transfer_counts_as_settled_once_its_error_and_outcomes_are_there() -> None:
    """Its caller reads one after the other, without a lock."""
    seen: list[tuple[Exception | None, list[BlockOutcome]]] = []

    class Watched(Transfer):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "is_settled" and value:
                seen.append((self.error, list(self._outcomes)))
            super().__setattr__(name, value)

    error = PeerUnreachable("p", "ended")
    transfer = Watched(apart(1), on_settled=lambda: None)
    transfer.begin(0, 0, deadline=None)
    transfer.settle(error)
    assert seen == [(error, [BlockOutcome.FAILED])]
    assert transfer.is_settled


def test_a_transfer_without_a_thread_fails_and_pins_no_memory(
    engine: MooncakeTransferEngine, peer: str
) -> None:
    with (
        no_threads("mooncake-transfer"),
        pytest.raises(TransferError, match="no thread for the transfer: can't start new thread"),
    ):
        engine.begin(peer, TransferOp.READ, apart(1), timeout=30)
    engine.deregister(BASE)

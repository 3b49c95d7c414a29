"""Transfers over a transport that records what reaches it and answers as it is told."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rigs.stores.fake_transfer_engine import (
    BASE,
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    apart,
    listening_peer,
)
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    BlockOutcome,
    OverlappingRange,
    RegistrationError,
    TransferOp,
    UnknownRange,
)
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


# -- memory --------------------------------------------------------------------------------------


def test_all_engine_objects_know_the_same_memory(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    engine.transfer(peer, TransferOp.WRITE, apart(1), timeout=30)
    assert engine.batch_register([BASE * 1000, BASE * 1001], [10, 20]) == 0
    known = {BASE: 64 * MIB, BASE * 1000: 10, BASE * 1001: 20}
    assert [made.registered for made in fakes.made] == [known, known]
    assert engine.describe()["registered_bytes"] == 64 * MIB + 30
    assert engine.is_registered(BASE + 1, 64 * MIB - 1) and engine.is_registered(BASE * 1000, 10)
    assert not engine.is_registered(BASE, 64 * MIB + 1) and not engine.is_registered(BASE - 1, 2)
    assert engine.batch_deregister([BASE * 1001, BASE]) == 0
    engine.deregister(BASE * 1000)
    assert [made.registered for made in fakes.made] == [{}, {}]


def test_memory_that_is_refused_is_in_no_book(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine
) -> None:
    with pytest.raises(OverlappingRange):
        engine.register(BASE + 5, 1)
    with pytest.raises(UnknownRange):
        engine.deregister(BASE + 5)
    fakes.register_code = -1
    with pytest.raises(RegistrationError, match=r"30 bytes in 2 ranges \(code -1\)"):
        engine.batch_register([10, 100], [10, 20])
    fakes.register_code = 0
    assert engine.batch_register([10, 100], [10, 20]) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 60)).map(lambda r: (r[0] * 10 + 1, r[1])),
        max_size=6,
    ),
    st.lists(
        st.tuples(st.integers(-10, 5000), st.integers(0, 4000), st.integers(-1, 70)), max_size=6
    ),
)
def test_no_address_outside_the_registered_ranges_reaches_the_library(
    ranges: list[tuple[int, int]], wanted: list[tuple[int, int, int]]
) -> None:
    fakes = FakeTransferEngines()
    engine = MooncakeTransferEngine(
        "127.0.0.1", new_engine=fakes.new_engine, supported=("tcp",), rdma_root=Path("/nowhere")
    )
    known: set[int] = set()
    for ptr, length in ranges:
        with contextlib.suppress(OverlappingRange):
            engine.register(ptr, length)
            known |= set(range(ptr, ptr + length))
    with listening_peer() as peer:
        everything = [Block(*parts) for parts in wanted]
        for blocks in (everything, *([block] for block in everything)):
            with contextlib.suppress(ValueError):
                engine.transfer(peer, TransferOp.READ, blocks, timeout=30)
    for call in fakes.calls:
        for local, _, length in call.requests:
            assert set(range(local, local + length)) <= known
    engine.close()


# -- transfers -----------------------------------------------------------------------------------


def test_neighbours_travel_as_one(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    blocks = [Block(BASE + i * 10, 1000 + i * 10, 10) for i in range(5)]
    transfer = engine.transfer(peer, TransferOp.READ, blocks, timeout=30)
    assert fakes.calls == [FakeCall("read", peer, [(BASE, 1000, 50)])]
    assert transfer.is_done and transfer.is_settled and transfer.in_flight == []
    assert transfer.outcomes == [BlockOutcome.DONE] * 5


def test_ten_thousand_blocks_go_in_batches_that_the_transport_takes(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    assert engine.transfer(peer, TransferOp.WRITE, apart(10_000), timeout=60).is_done
    assert sum(len(call.requests) for call in fakes.calls) == 10_000
    assert max(len(call.requests) for call in fakes.calls) == 512


def test_all_users_of_a_peer_share_one_budget(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    lock = threading.Lock()
    held = {"now": 0, "most": 0}
    pairs = threading.Semaphore(0)

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        with lock:
            held["now"] += len(call.requests)
            held["most"] = max(held["most"], held["now"])
        pairs.acquire(timeout=0.002)
        with lock:
            held["now"] -= len(call.requests)
        return 0

    fakes.answer = answer
    threads = [
        threading.Thread(
            target=engine.transfer, args=(peer, op, apart(2_000)), kwargs={"timeout": 60}
        )
        for op in (TransferOp.WRITE, TransferOp.READ) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(len(call.requests) for call in fakes.calls) == 16_000
    assert 512 <= held["most"] <= 1024
    assert engine.describe()["requests_in_flight"] == {peer: 0}


def test_upstreams_calls_answer_with_numbers(
    fakes: FakeTransferEngines, engine: MooncakeTransferEngine, peer: str
) -> None:
    assert engine.transfer_sync(peer, BASE, 7, 10) == 0
    assert engine.batch_transfer_sync(peer, [BASE, BASE + 50], [7, 70], [10, 20]) == 0
    assert [call.requests for call in fakes.calls] == [
        [(BASE, 7, 10)],
        [(BASE, 7, 10), (BASE + 50, 70, 20)],
    ]
    fakes.answer = lambda _, call: -1 if call.requests else 0
    assert engine.transfer_sync(peer, BASE, 7, 10) == -1
    assert engine.transfer_sync(f"127.0.0.1:{get_free_port()}", BASE, 7, 10) == -1
    with pytest.raises(UnknownRange):
        engine.transfer_sync(peer, 5, 7, 10)
    with pytest.raises(ValueError, match="zip"):
        engine.batch_transfer_sync(peer, [BASE], [7, 8], [10])


@pytest.mark.parametrize("name", ["", "host", "host:", ":5", "host:99999", "host:5x"])
def test_what_is_no_session_id(engine: MooncakeTransferEngine, name: str) -> None:
    with pytest.raises(ValueError, match="is no session id; it is HOST:PORT"):
        engine.transfer(name, TransferOp.WRITE, apart(1), timeout=1)


def test_a_probe_is_a_connection(engine: MooncakeTransferEngine, peer: str) -> None:
    assert engine.send_probe(peer) == 0
    assert engine.send_probe(f"127.0.0.1:{get_free_port()}") == -1

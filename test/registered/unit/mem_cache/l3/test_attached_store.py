"""Protection of the engine from a store that hangs, fails or breaks its contract.

No thread of L3 is left behind where the system has too few.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rigs.stores.hanging_store import HangingBench, HangingStore, wait_for
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolTransferResult,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.storage_reads import CheckOperation
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.l3.store_calls import StoreCalls
from sglang.srt.mem_cache.l3.store_presence import StorePresence
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

LANDED = CacheOutcome.LANDED


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_c10_a_page_that_timed_out_is_not_asked_for_again_though_probes_succeed(
    bench: HangingBench, caplog: pytest.LogCaptureFixture, kind: str, raises: bool
) -> None:
    """One node of a store hangs, the others answer: one timeout a page and period."""
    move = bench.read if kind == "read" else bench.write
    bench.store.hangs, bench.store.raises = {"bad"}, raises
    assert move("bad", "behind") is CacheOutcome.FAILED
    assert bench.io.breaker.is_open
    slow = f"L3 took 100.0 s for a {kind}, more than 60"
    why = f"L3 {kind} failed: timed out" if raises else slow
    assert [line for line in caplog.messages if "left alone" in line] == [
        f"L3 is left alone for a while: {why}"
    ]
    for _ in range(3):
        bench.recover()
        assert move("bad", "behind") is CacheOutcome.UNAVAILABLE
    assert len(bench.store.asked) == 1
    # Others go on, and a prompt is read up to the page that hung.
    assert move("good") is CacheOutcome.LANDED
    if kind == "read":
        assert move("good", "bad") is CacheOutcome.LANDED
        assert bench.store.asked[1:] == [["good"], ["good"]]


def test_c10_the_breaker_opens_once_for_a_call_that_hangs_and_fails(bench: HangingBench) -> None:
    bench.store.hangs, bench.store.raises = {"bad"}, True
    bench.read("bad")
    assert bench.io.breaker._pause == 1.0, "one failure, one pause"
    assert bench.metrics.breaker_open._value.get() == 1
    assert bench.read("good") is CacheOutcome.UNAVAILABLE
    bench.recover()
    assert bench.read("good") is CacheOutcome.LANDED
    assert bench.metrics.breaker_open._value.get() == 0
    assert bench.io.reconnects == 1


def test_a_store_that_stays_away_is_logged(
    bench: HangingBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.hangs = {"bad"}
    bench.read("bad")
    monkeypatch.setattr(bench.store, "probe", lambda: False)
    bench.let_the_pause_pass()
    wait_for(lambda: "L3 is still unavailable: its probe failed" in caplog.messages)
    assert bench.read("good") is CacheOutcome.UNAVAILABLE


def test_c10_nobody_waits_for_a_probe_that_hangs(bench: HangingBench) -> None:
    bench.store.hangs = {"bad"}
    bench.read("bad")
    bench.store.probe_gate.clear()
    bench.let_the_pause_pass()
    wait_for(lambda: bench.io.is_calling)
    assert bench.io.available
    assert bench.read("good") is bench.write("good") is CacheOutcome.UNAVAILABLE
    bench.clock.pass_too_long()
    assert not bench.io.available
    assert not bench.io.silence_s, "no request waits for it"
    bench.store.probe_gate.set()
    wait_for(lambda: not bench.io.breaker.is_open)
    assert bench.io.available
    assert bench.read("good") is CacheOutcome.LANDED


def test_a_store_that_works_again_is_probed_without_any_request(bench: HangingBench) -> None:
    bench.store.hangs = {"bad"}
    bench.read("bad")
    asked = bench.store.questions.copy()
    bench.recover()
    assert bench.io.reconnects == 1
    assert bench.store.questions == asked


def test_a_get_that_does_not_return_is_a_silence_and_a_put_is_none(bench: HangingBench) -> None:
    bench.store.hangs = {"bad"}
    assert bench.io.silence_s == 0
    bench.store.goes_on.clear()
    read = bench.submit("bad")
    wait_for(lambda: bool(bench.store.asked))
    assert bench.io.silence_s == 100
    bench.clock.now += 5
    assert bench.io.silence_s == 105
    bench.store.goes_on.set()
    wait_for(lambda: read.outcome is not None)
    assert bench.io.silence_s == 0
    bench.recover()
    bench.store.goes_on.clear()
    write = bench.begin_write("bad")
    wait_for(lambda: len(bench.store.asked) == 2)
    assert not bench.io.available
    assert bench.io.silence_s == 0
    bench.store.goes_on.set()
    wait_for(lambda: write.outcome is not None)


def test_a_large_get_is_no_silence_before_twice_its_usual_time(bench: HangingBench) -> None:
    for _ in range(4):
        bench.io.read_rate.add(1, 1.0)
    bench.store.hangs = {"p29"}
    bench.store.goes_on.clear()
    read = bench.submit(*(f"p{number}" for number in range(30)))
    wait_for(lambda: bool(bench.store.asked))
    # These tests wait for 60 s, and its 30 pages take 30 s.
    assert bench.io.silence_s == 0, "after 100 s"
    bench.clock.now += 20
    assert bench.io.silence_s == 0
    bench.clock.now += 1
    assert bench.io.silence_s == 121
    bench.store.goes_on.set()
    wait_for(lambda: read.outcome is not None)
    bench.recover()


@pytest.mark.parametrize("choice", OnUnreachable)
def test_a_server_starts_without_its_store_if_it_may(
    caplog: pytest.LogCaptureFixture, choice: OnUnreachable
) -> None:
    def connect() -> HangingStore:
        raise StorageUnreachable("nobody answers")

    def make() -> StoreCalls:
        return StoreCalls(
            connect, backend="hanging", config={},
            settings=StorageSettings(prefetch_threshold=1, on_unreachable=choice),
            page_size=1, page_bytes=64, pages_per_read=64, metrics=HiCacheMetrics(None),
            pools=StoredPools("ns"),
        )  # fmt: skip

    if choice is not OnUnreachable.DEGRADE:
        with pytest.raises(StorageUnreachable, match="nobody answers"):
            make()
        return
    assert make().breaker.is_open
    assert caplog.messages == [
        "L3 is unavailable, running without it until it answers: nobody answers"
    ]


def test_nothing_is_asked_of_a_store_before_it_is_connected(bench: HangingBench) -> None:
    client, bench.io.client = bench.io.client, None
    with pytest.raises(StorageUnavailable, match="the storage backend is not connected"):
        bench.io.clear()
    bench.io.client = client
    assert bench.io.available and bench.read("good") is CacheOutcome.LANDED


def test_short_calls_are_no_silence(bench: HangingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 0.25)
    bench.io._call_started["exists"] = bench.clock.now
    bench.clock.now += 0.25
    assert bench.io.silence_s == 0
    bench.clock.now += 0.25
    assert bench.io.silence_s == 0.5
    bench.io._call_started["get"] = bench.clock.now
    assert bench.io.silence_s == 0.5, "of the call that has taken longest"
    bench.io._call_started.clear()


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param({"kv": [LANDED, LANDED]}, "2 results for 3 pages", id="fewer"),
        pytest.param({"kv": [True] * 4}, "4 results for 3 pages", id="more"),
        pytest.param({"kv": []}, "0 results for 3 pages", id="none"),
        pytest.param({"kv": [True, None, True]}, "None where True or False", id="null"),
        pytest.param({"kv": [1, 1, 1]}, "1 where True or False", id="codes"),
        pytest.param({"kv": ["landed"] * 3}, "of type str where True or False", id="words"),
        pytest.param({"kv": "yes"}, "of type str where a list", id="text"),
        pytest.param({"kv": iter([True] * 3)}, "where a list", id="iterator"),
        pytest.param({"kv": None}, "None where a list", id="no-list"),
        pytest.param({"indexer": [True] * 3}, "nothing about pool 'kv'", id="other-pool"),
        pytest.param([True] * 3, "of type list where results by pool", id="no-pools"),
        pytest.param(True, "True where results by pool", id="bool"),
    ],
)
def test_a_wrong_answer_to_a_transfer_moves_no_page_and_is_a_failing_store(
    bench: HangingBench, caplog: pytest.LogCaptureFixture, kind: str, answer: object, words: str
) -> None:
    bench.store.moved = answer
    if kind == "read":
        operation = bench.submit("a", "b", "c")
        wait_for(lambda: operation.outcome is not None)
        assert (operation.outcome, operation.landed_pages) == (CacheOutcome.FAILED, 0)
    else:
        assert bench.write("a", "b", "c") is CacheOutcome.FAILED
    call = "get" if kind == "read" else "set"
    assert (bench.count(call, "failed"), bench.count(call, "landed")) == (3, 0)
    assert bench.io.breaker.is_open
    assert f"HangingStore.batch_{call}_v2 answered" in caplog.text and words in caplog.text


def test_results_of_numpy_are_taken_for_what_they_are(bench: HangingBench) -> None:
    bench.store.moved = {"kv": [np.True_, np.False_]}
    bench.store.found = [PoolTransferResult(np.int64(2))]  # type: ignore[arg-type]
    operation = bench.submit("a", "b")
    wait_for(lambda: operation.outcome is not None)
    assert (operation.outcome, operation.landed_pages) == (CacheOutcome.MISS, 1)
    assert bench.write("a", "b") is CacheOutcome.FAILED
    assert not bench.io.breaker.is_open


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param([PoolTransferResult(-1)], "-1 pages, having been asked about 2", id="less"),
        pytest.param([PoolTransferResult(3)], "3 pages, having been asked about 2", id="more"),
        pytest.param([PoolTransferResult(True)], "True where a number", id="bool"),
        pytest.param([PoolTransferResult(2.0)], "2.0 where a number", id="float"),  # type: ignore[arg-type]
        pytest.param([PoolTransferResult(None)], "None where a number", id="null"),  # type: ignore[arg-type]
        pytest.param([2], "2 where a PoolTransferResult", id="plain"),
        pytest.param([], "0 results for 1 prompts", id="fewer"),
        pytest.param([PoolTransferResult(2)] * 2, "2 results for 1 prompts", id="more-prompts"),
        pytest.param(PoolTransferResult(2), "where a list", id="no-list"),
    ],
)
def test_a_wrong_answer_to_a_question_is_a_failing_store(
    bench: HangingBench, caplog: pytest.LogCaptureFixture, answer: object, words: str
) -> None:
    bench.store.found = answer
    operation = bench.submit("a", "b")
    wait_for(lambda: operation.outcome is not None)
    assert (operation.outcome, operation.hit_pages) == (CacheOutcome.FAILED, 0)
    assert bench.store.asked == [], "nothing is read"
    assert bench.io.breaker.is_open
    assert "HangingStore.prompts_exist answered" in caplog.text and words in caplog.text
    bench.recover()
    check = CheckOperation([PageHash("a"), PageHash("b")], epoch=0, asked_at=0)
    bench.io.reads.queue.put(check)
    wait_for(lambda: check.there is not None)
    assert check.there == 2, "nothing is known to be lost"
    assert bench.io.breaker.is_open


@pytest.mark.parametrize("raised", [KeyError("page"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_whatever_a_backend_raises_its_thread_goes_on(
    bench: HangingBench, caplog: pytest.LogCaptureFixture, kind: str, raised: BaseException
) -> None:
    move = bench.read if kind == "read" else bench.write
    bench.store.moved = raised
    assert move("a") is CacheOutcome.FAILED
    assert bench.io.breaker.is_open
    assert "HangingStore" in caplog.text and type(raised).__name__ in caplog.text
    bench.store.moved = None
    bench.recover()
    assert move("a") is CacheOutcome.LANDED


class ClosingStore(HangingStore):
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    "missing", ["hicache-prefetch", "hicache-backup", "hicache-probe", "hicache-presence"]
)
def test_without_a_thread_for_l3_its_client_is_closed(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    store, start, before = ClosingStore(), threading.Thread.start, set(threading.enumerate())

    def start_unless_missing(thread: threading.Thread) -> None:
        if thread.name == missing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_missing)
    with pytest.raises(StorageUnavailable, match="no thread for L3: can't start new thread"):
        AttachedStore(
            lambda: store,
            backend="closing",
            config={},
            settings=StorageSettings(),
            pools=StoredPools("n"),
            page_size=1,
            page_bytes=8,
            pages_per_read=4,
            metrics=HiCacheMetrics(None),
            presence=StorePresence(),
        )
    assert store.closed == 1
    wait_for(lambda: set(threading.enumerate()) <= before)

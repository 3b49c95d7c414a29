"""The threads in front of L3 and a store that hangs: what is asked of it, and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
    StorageUnavailable,
)
from sglang.srt.mem_cache.l3 import guarded_store, storage_writes
from sglang.srt.mem_cache.l3.recent_timeouts import PERIOD_S, RecentTimeouts
from sglang.srt.mem_cache.l3.storage_groups import PAGES_PER_CALL, next_group
from sglang.srt.mem_cache.l3.storage_io import StorageIO
from sglang.srt.mem_cache.l3.storage_operation import (
    CheckOperation,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

STUCK_S = 0.05
"""Stands in for three seconds."""


class HangingStore(HiCacheStorage):
    """Has every page and answers probes; a transfer of a page in `hangs` takes too long."""

    def __init__(self) -> None:
        self.hangs: set[str] = set()
        self.raises = self.is_mute = False
        self.asked: list[list[str]] = []
        self.moved: object = None
        """What it answers to transfers, if anything else than the truth."""
        self.found: object = None
        """What it answers to questions, the same."""
        self.absent: set[str] = set()
        self.questions: list[int] = []
        """Of how many prompts each."""
        self.probe_gate = threading.Event()
        self.probe_gate.set()

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        self.questions.append(len(prompts))
        if self.is_mute:
            raise StorageUnavailable("no answer")
        if self.found is not None:
            return self.found  # type: ignore[return-value]
        absent = {f"ns/{page}" for page in self.absent}
        return [PoolTransferResult(0 if absent & set(keys) else len(keys)) for keys in prompts]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        keys = transfers[0].keys or []
        self.asked.append([key.removeprefix("ns/") for key in keys])
        if isinstance(self.moved, BaseException):
            raise self.moved
        if self.moved is not None:
            return self.moved  # type: ignore[return-value]
        if not self.hangs & set(self.asked[-1]):
            return {"kv": [CacheOutcome.LANDED] * len(keys)}
        time.sleep(STUCK_S * 1.5)
        if self.raises:
            raise StorageUnavailable("timed out")
        return {"kv": [CacheOutcome.FAILED] * len(keys)}

    batch_set_v2 = batch_get_v2

    def probe(self) -> bool:
        return self.probe_gate.wait(10)

    def get(self, *args: object, **kwargs: object) -> torch.Tensor | None:
        raise NotImplementedError

    set = get  # type: ignore[assignment]

    def exists(self, key: str) -> bool:
        raise NotImplementedError


class Bench:
    """A `StorageIO` on a hanging store."""

    def __init__(self) -> None:
        self.store = HangingStore()
        self.metrics = HiCacheMetrics(None)
        self.io = StorageIO(
            lambda: self.store,
            namespace="ns", page_size=1, page_bytes=64, pages_per_read=64, threshold_pages=1,
            pass_prefix_keys=False, metrics=self.metrics,
        )  # fmt: skip

    def read(self, *pages: str) -> CacheOutcome | None:
        """Read `pages` to the end; how it ended."""
        operation = self.submit(*pages)
        wait_for(lambda: operation.ended)
        return operation.outcome

    def submit(self, *pages: str) -> PrefetchOperation:
        operation = self.operation(*pages)
        self.io.submit_prefetches([operation])
        return operation

    def operation(self, *pages: str) -> PrefetchOperation:
        return PrefetchOperation(
            request_id="r", key=RadixKey([]), start=0,
            host_indices=torch.arange(len(pages)), hashes=[PageHash(page) for page in pages],
            prefix_hashes=[], deadline=0.0, epoch=0,
        )  # fmt: skip

    def write(self, *pages: str) -> CacheOutcome | None:
        """Write `pages`; how that ended."""
        operation = StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(len(pages)),
            hashes=[PageHash(page) for page in pages], prefix_hashes=[], after=None, epoch=0,
        )  # fmt: skip
        self.io.submit_backup(operation)
        wait_for(lambda: operation.ended)
        return operation.outcome

    def count(self, call: str, outcome: str) -> float:
        """Pages whose `call` ended so."""
        pages: float = self.metrics.pages.labels(call, outcome)._value.get()
        return pages

    def let_the_pause_pass(self) -> None:
        self.io.store._breaker._retry_at = time.monotonic()


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(guarded_store, "_STUCK_AFTER_S", STUCK_S)
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    made = Bench()
    yield made
    made.store.probe_gate.set()
    assert made.io.close()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_c10_a_page_that_timed_out_is_not_asked_for_again_though_probes_succeed(
    bench: Bench, kind: str, raises: bool
) -> None:
    """One node of a store hangs, the others answer: one timeout a page and period."""
    move = bench.read if kind == "read" else bench.write
    bench.store.hangs, bench.store.raises = {"bad"}, raises
    assert move("bad", "behind") is CacheOutcome.FAILED
    assert bench.io.is_open
    for _ in range(3):
        bench.let_the_pause_pass()
        assert move("bad", "behind") is CacheOutcome.UNAVAILABLE
    assert len(bench.store.asked) == 1
    # Others go on, and a prompt is read up to the page that hung.
    bench.let_the_pause_pass()
    assert move("good") is CacheOutcome.LANDED
    if kind == "read":
        assert move("good", "bad") is CacheOutcome.LANDED
        assert bench.store.asked[1:] == [["good"], ["good"]]


def test_c10_the_breaker_opens_once_for_a_call_that_hangs_and_fails(bench: Bench) -> None:
    bench.store.hangs, bench.store.raises = {"bad"}, True
    bench.read("bad")
    assert bench.io.store._breaker._pause == 1.0, "one failure, one pause"
    assert bench.metrics.breaker_open._value.get() == 1
    assert bench.read("good") is CacheOutcome.UNAVAILABLE
    bench.let_the_pause_pass()
    assert bench.read("good") is CacheOutcome.LANDED
    assert not bench.io.is_open
    assert bench.metrics.breaker_open._value.get() == 0
    assert bench.io.reconnects == 1


def test_c10_nobody_waits_behind_a_probe_that_hangs(bench: Bench) -> None:
    bench.store.hangs = {"bad"}
    bench.read("bad")
    bench.let_the_pause_pass()
    bench.store.probe_gate.clear()
    behind = bench.submit("good")
    assert bench.io.available
    wait_for(lambda: not bench.io.available)
    bench.store.probe_gate.set()
    wait_for(lambda: behind.ended)
    assert bench.io.available
    assert behind.outcome is CacheOutcome.LANDED


def test_pages_are_left_alone_for_a_period() -> None:
    now = 0.0
    timeouts = RecentTimeouts(clock=lambda: now)
    first, second, third = (PageHash(name) for name in "abc")
    timeouts.add([second])
    assert timeouts.leading_allowed([first, second, third]) == 1
    assert timeouts.leading_allowed([third]) == 1
    now = PERIOD_S / 2
    timeouts.add([third])
    now = PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 2
    now = 2 * PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 3


def test_l3_is_asked_what_it_still_has_now_and_then_and_less_often_where_it_loses_pages(
    bench: Bench,
) -> None:
    def check(*pages: str) -> CacheOutcome:
        operation = CheckOperation([PageHash(page) for page in pages], epoch=0)
        bench.io.submit_check(operation)
        wait_for(lambda: operation.outcome is not None)
        assert operation.outcome is not None
        return operation.outcome

    def pause() -> float:
        left = bench.io.reads._check_at - time.monotonic()
        bench.io.reads._check_at = 0.0
        return left

    assert check("a", "b") is CacheOutcome.LANDED
    bench.store.absent = {"b"}
    assert check("a", "b") is CacheOutcome.LANDED, "not asked again so soon"
    assert bench.store.questions == [1]
    assert 25 < pause() <= 30
    for longer in (60, 120, 240, 480, 600, 600):
        assert check("a", "b") is CacheOutcome.MISS
        assert longer - 5 < pause() <= longer
    bench.store.is_mute = True
    assert check("a", "b") is CacheOutcome.LANDED, "whether it has lost anything is not known"
    assert bench.io.is_open
    bench.store.is_mute, bench.store.absent = False, set()
    bench.let_the_pause_pass()
    bench.io.reads._check_at = time.monotonic() + 100
    asked = len(bench.store.questions)
    assert check("a", "b") is CacheOutcome.LANDED
    assert (len(bench.store.questions), bench.io.reconnects) == (asked, 1), "probed all the same"
    bench.io.reads._check_at = 0.0
    assert check("a", "b") is CacheOutcome.LANDED
    assert 25 < pause() <= 30


def test_prompts_of_one_tick_are_one_question(bench: Bench) -> None:
    bench.store.absent = {"b"}
    here, absent, cut = (bench.operation(page) for page in ("a", "b", "c"))
    cut.is_terminated = True
    bench.io.submit_prefetches([here, absent, cut])
    wait_for(lambda: here.ended)
    assert [one.outcome for one in (here, absent, cut)] == ["landed", "miss", "late"]
    assert (here.landed_pages, absent.landed_pages) == (1, 0)
    assert bench.store.questions == [2]


def test_who_misses_does_not_wait_for_who_reads(bench: Bench) -> None:
    bench.store.absent, bench.store.hangs = {"b"}, {"a"}
    reads, misses = bench.operation("a"), bench.operation("b")
    bench.io.submit_prefetches([reads, misses])
    wait_for(lambda: misses.ended)
    assert not reads.ended
    wait_for(lambda: reads.ended)


def test_a_question_that_fails_fails_all_it_was_about(bench: Bench) -> None:
    bench.store.is_mute = True
    operations = [bench.operation(page) for page in "ab"]
    bench.io.submit_prefetches(operations)
    wait_for(lambda: all(one.ended for one in operations))
    assert [one.outcome for one in operations] == ["failed", "failed"]
    assert [one.hit_pages for one in operations] == [0, 0]
    assert bench.io.is_open


def test_questions_have_a_size(bench: Bench) -> None:
    long = [str(number) for number in range(600)]
    operations = [bench.operation(*long), bench.operation(*long)]
    operations += [bench.operation(str(number)) for number in range(20)]
    bench.io.submit_prefetches(operations)
    wait_for(lambda: all(one.ended for one in operations))
    assert bench.store.questions == [1, 16, 5]


def test_a_write_goes_along_only_with_what_it_hangs_on() -> None:
    def operation(after: StorageOperation | None) -> StorageOperation:
        return StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(1),
            hashes=[PageHash("p")], prefix_hashes=[], after=after, epoch=0,
        )  # fmt: skip

    first, lost = operation(None), operation(None)
    lost.finish(CacheOutcome.FAILED)
    second, orphan = operation(first), operation(lost)
    assert next_group([first, second, orphan]) == [first, second]
    assert next_group([orphan, first]) == [orphan], "alone it finds out why"
    first.finish(CacheOutcome.LANDED)
    assert next_group([second, operation(None)])[0] is second


class RecordingStore(HangingStore):
    """Keeps what is written; refuses what holds `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.refused: str | None = None

    def batch_set_v2(self, transfers: Any, extra_info: object = None) -> dict[str, Any]:
        keys = [key.rsplit("/", 1)[-1] for key in transfers[0].keys]
        self.calls.append(keys)
        assert len(transfers[0].host_indices) == len(keys)
        if self.refused not in keys:
            return {"kv": [CacheOutcome.LANDED] * len(keys)}
        good = keys.index(self.refused)
        rest = [CacheOutcome.SHORT] * (len(keys) - good - 1)
        return {"kv": [*[CacheOutcome.LANDED] * good, CacheOutcome.FAILED, *rest]}


def write_at_once(io: StorageIO, chains: list[list[str]]) -> list[StorageOperation]:
    """Queue one write a chain, all within a moment; those of the same first letter follow each
    other. Returns them when all have ended."""
    operations: list[StorageOperation] = []
    for pages in chains:
        before = [o for o in operations if o.hashes[0][0] == pages[0][0]]
        operation = StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(len(pages)),
            hashes=[PageHash(page) for page in pages], prefix_hashes=[],
            after=before[-1] if before else None, epoch=0,
        )  # fmt: skip
        operations.append(operation)
    for operation in operations:
        io.submit_backup(operation)
    wait_for(lambda: all(operation.ended for operation in operations))
    return operations


@pytest.fixture
def recording() -> Iterator[tuple[RecordingStore, StorageIO]]:
    store = RecordingStore()
    io = StorageIO(
        lambda: store,
        namespace="ns", page_size=1, page_bytes=64, pages_per_read=64, threshold_pages=1,
        pass_prefix_keys=False, metrics=HiCacheMetrics(None),
    )  # fmt: skip
    yield store, io
    assert io.close()


def test_nodes_that_queue_up_are_written_in_one_call(
    recording: tuple[RecordingStore, StorageIO],
) -> None:
    store, io = recording
    operations = write_at_once(io, [["a1", "a2"], ["b1"], ["a3"]])
    assert {operation.outcome for operation in operations} == {CacheOutcome.LANDED}
    assert store.calls == [["a1", "a2", "b1", "a3"]]


def test_a_call_takes_no_more_pages_than_it_may(
    recording: tuple[RecordingStore, StorageIO],
) -> None:
    store, io = recording
    whole = [f"b{i}" for i in range(PAGES_PER_CALL)]
    operations = write_at_once(io, [["a1"], whole, ["a2"]])
    assert {operation.outcome for operation in operations} == {CacheOutcome.LANDED}
    assert max(map(len, store.calls)) == PAGES_PER_CALL
    assert sorted(key for call in store.calls for key in call) == sorted([*whole, "a1", "a2"])


def test_one_refused_page_takes_its_own_chain_down_and_no_other(
    recording: tuple[RecordingStore, StorageIO],
) -> None:
    store, io = recording
    store.refused = "a2"
    a, b, after_a = write_at_once(io, [["a1", "a2"], ["b1"], ["a3"]])
    assert (a.outcome, b.outcome) == (CacheOutcome.FAILED, CacheOutcome.LANDED)
    assert after_a.outcome is CacheOutcome.SHORT
    assert not any("a3" in call for call in store.calls[1:])


# ---- backends that break their contract --------------------------------------------------------

LANDED = CacheOutcome.LANDED


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
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: str, answer: object, words: str
) -> None:
    bench.store.moved = answer
    if kind == "read":
        operation = bench.submit("a", "b", "c")
        wait_for(lambda: operation.ended)
        assert (operation.outcome, operation.landed_pages) == (CacheOutcome.FAILED, 0)
    else:
        assert bench.write("a", "b", "c") is CacheOutcome.FAILED
    call = "get" if kind == "read" else "set"
    assert (bench.count(call, "failed"), bench.count(call, "landed")) == (3, 0)
    assert bench.io.is_open
    assert f"HangingStore.batch_{call}_v2 answered" in caplog.text and words in caplog.text


def test_results_of_numpy_are_taken_for_what_they_are(bench: Bench) -> None:
    bench.store.moved = {"kv": [np.True_, np.False_]}
    bench.store.found = [PoolTransferResult(np.int64(2))]  # type: ignore[arg-type]
    operation = bench.submit("a", "b")
    wait_for(lambda: operation.ended)
    assert (operation.outcome, operation.landed_pages) == (CacheOutcome.MISS, 1)
    assert bench.write("a", "b") is CacheOutcome.FAILED
    assert not bench.io.is_open


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
    bench: Bench, caplog: pytest.LogCaptureFixture, answer: object, words: str
) -> None:
    bench.store.found = answer
    operation = bench.submit("a", "b")
    wait_for(lambda: operation.ended)
    assert (operation.outcome, operation.hit_pages) == (CacheOutcome.FAILED, 0)
    assert bench.store.asked == [], "nothing is read"
    assert bench.io.is_open
    assert "HangingStore.prompts_exist answered" in caplog.text and words in caplog.text
    bench.let_the_pause_pass()
    check = CheckOperation([PageHash("a"), PageHash("b")], epoch=0)
    bench.io.submit_check(check)
    wait_for(lambda: check.outcome is not None)
    assert check.outcome is CacheOutcome.LANDED, "nothing is known to be lost"
    assert bench.io.is_open


@pytest.mark.parametrize("raised", [KeyError("page"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_whatever_a_backend_raises_its_thread_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: str, raised: BaseException
) -> None:
    move = bench.read if kind == "read" else bench.write
    bench.store.moved = raised
    assert move("a") is CacheOutcome.FAILED
    assert bench.io.is_open
    assert "HangingStore" in caplog.text and type(raised).__name__ in caplog.text
    bench.store.moved = None
    bench.let_the_pause_pass()
    assert move("a") is CacheOutcome.LANDED


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

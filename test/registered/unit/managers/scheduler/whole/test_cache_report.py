"""Cache reports: what each tier had of a prompt, and every reason why one ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import HeldReads
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3 import storage_prefetch
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.messages.io_struct import AbortReq, FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PAGE = 16
IDS = prompt(1, 100)
"""Six pages, and four tokens."""
Cuts = list[tuple[str | None, int, str]]


class ReportRig(SchedulerRig):
    """Asks for reports."""

    def ask(self, rid: str, ids: list[int], count: int = 4, **fields: Any) -> CacheReport:
        self.step(self.request(rid, ids, greedy(count), return_cache_report=True, **fields))
        self.settle()
        return self.report(rid)

    def report(self, rid: str) -> CacheReport:
        last = self.results[rid].last
        assert last is not None
        assert last.cache_report is not None
        return last.cache_report

    @property
    def hi(self) -> HiRadixCache:
        assert isinstance(self.tree, HiRadixCache)
        return self.tree

    def flush(self) -> None:
        self.step(FlushCacheReqInput(req_id="flush"))
        assert self.answers.pop().success


def tiered(model: Path, *, threshold: int = PAGE, **args: Any) -> ReportRig:
    extra = {"prefetch_threshold": threshold, "prefetch_timeout_base": 30}
    settings: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "page_size": PAGE,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    return ReportRig(model, **{**settings, **args})


@pytest.fixture(name="rig")
def make_rig(model: Path) -> Iterator[ReportRig]:
    rig = tiered(model, pool_tokens=2048)
    yield rig
    rig.close()


def cuts_of(report: CacheReport) -> Cuts:
    return [(cut.tier, cut.at, cut.reason) for cut in report.cuts]


def found(report: CacheReport) -> tuple[int, int, int, int | None]:
    return report.on_arrival, report.device, report.host, report.storage


def page_file(storage_dir: Path, ids: list[int], page: int) -> Path:
    """The file of a page in L3."""
    name = RadixKey(ids).page_hashes(PAGE)[page]
    (path,) = (path for path in storage_dir.rglob("*") if path.is_file() and name in str(path))
    return path


# ---- L1 and L2 -----------------------------------------------------------------------------


def test_a_request_that_does_not_ask_gets_none(rig: ReportRig) -> None:
    rig.generate([IDS])
    (got,) = rig.results.values()
    assert got.last is not None
    assert got.last.cache_report is None


def test_each_tier_reports_its_tokens_and_cut(model: Path) -> None:
    rig = tiered(model)
    try:
        cold = rig.ask("cold", IDS)
        assert found(cold) == (0, 0, 0, 0)
        assert cuts_of(cold) == [
            ("device", 0, "no_page"), ("host", 0, "no_page"), ("storage", 0, "miss"),
        ]  # fmt: skip
        device = rig.ask("device", IDS)
        assert found(device) == (96, 96, 0, 0)
        assert cuts_of(device) == [(None, 96, "partial_page")]
        for seed in range(10, 15):
            rig.ask(f"filler-{seed}", prompt(seed, 120))
        host = rig.ask("host", IDS)
        assert found(host) == (96, 0, 96, 0)
        assert cuts_of(host) == [("device", 0, "no_page"), (None, 96, "partial_page")]
        rig.flush()
        storage = rig.ask("storage", IDS)
        assert found(storage) == (0, 0, 96, 96)
        assert cuts_of(storage) == [("device", 0, "no_page"), (None, 96, "partial_page")]
        assert rig.results["storage"].last is not None
        assert rig.results["storage"].last.cached_tokens_details.storage == 96
        longer = rig.ask("longer", [*IDS[:96], *prompt(2, 64)])
        assert cuts_of(longer) == [
            ("device", 96, "no_page"), ("host", 96, "no_page"), ("storage", 96, "miss"),
        ]  # fmt: skip
    finally:
        rig.close()


def test_last_tokens_and_partial_pages_are_reported(model: Path) -> None:
    rig = ReportRig(model, page_size=PAGE)
    rig.ask("cold", IDS)
    assert cuts_of(rig.ask("whole", IDS[:96])) == [(None, 96, "last_token")]
    asked = rig.ask("logprobs", IDS, return_logprob=True, logprob_start_len=50)
    assert cuts_of(asked) == [(None, 48, "logprobs")]
    assert asked.storage is None


def test_a_server_without_a_cache_reports_so(model: Path) -> None:
    rig = ReportRig(model, page_size=PAGE, disable_radix_cache=True)
    assert cuts_of(rig.ask("cold", IDS)) == [("device", 0, "disabled")]


@pytest.mark.parametrize(
    ("first", "second", "detail"),
    [
        ((None, None), ("a", None), "extra_key: the cached prompt has none"),
        (("b", None), ("a", None), "extra_key: the cached prompt has another"),
        (("b", "s"), (None, "s"), "extra_key: this prompt has none, the cached one has one"),
        ((None, "s"), (None, "t"), None),
        ((None, None), (None, "t"), None),
        (("a", "s"), ("a", None), None),
    ],
)
def test_the_same_tokens_under_another_key_are_reported(
    model: Path, first: tuple[str | None, ...], second: tuple[str | None, ...], detail: str | None
) -> None:
    """Prompts under another salt are not told."""
    rig = ReportRig(model, page_size=PAGE)
    rig.ask("first", IDS, extra_key=combine_extra_key(*first))
    (cut,) = rig.ask("second", IDS, extra_key=combine_extra_key(*second)).cuts
    assert (cut.at, cut.detail) == (0, detail)
    assert cut.reason == ("no_page" if detail is None else "other_namespace")


def test_pages_that_leave_while_a_request_waits(model: Path) -> None:
    rig = ReportRig(model, page_size=PAGE, max_requests=1, pool_tokens=2048)
    rig.ask("cold", IDS)
    rig.step(rig.request("runs", prompt(2, 20), greedy(10)))
    rig.step(rig.request("waits", IDS, return_cache_report=True))
    rig.tree.evict(EvictParams(num_tokens=1000))
    rig.settle()
    report = rig.report("waits")
    assert found(report) == (96, 0, 0, None)
    assert cuts_of(report) == [("device", 0, "evicted")]


@pytest.mark.parametrize(
    ("refused", "reason"), [("quota", "load_budget"), ("locked", "no_device_memory")]
)
def test_a_load_without_room(
    rig: ReportRig, monkeypatch: pytest.MonkeyPatch, refused: str, reason: str
) -> None:
    rig.ask("cold", IDS)
    rig.tree.evict(EvictParams(num_tokens=1000))
    if refused == "quota":
        load = rig.tree.init_load_back

        def within_three_pages(params: Any) -> Any:
            # A copy would keep the reason from the caller.
            params.mem_quota = 3 * PAGE - 1
            return load(params)

        monkeypatch.setattr(rig.tree, "init_load_back", within_three_pages)
    else:
        # All of L1 is in use when the load wants slots, and not when the prompt does.
        allocator = rig.tree.tree.allocator
        alloc, is_full = allocator.alloc, [True]
        monkeypatch.setattr(
            allocator,
            "alloc",
            lambda tokens: None if is_full and is_full.pop() else alloc(tokens),
        )
    report = rig.ask("warm", IDS)
    assert (report.device, report.host) == (0, 96)
    assert cuts_of(report) == [
        ("device", 0, "no_page"), ("host", 0, reason), (None, 96, "partial_page"),
    ]  # fmt: skip


# ---- recurrent states ----------------------------------------------------------------------


@pytest.fixture(name="hybrid", scope="module")
def make_hybrid(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_5", eos_token_id=None)


def test_a_missing_state_is_reported(hybrid: Path) -> None:
    rig = ReportRig(hybrid, page_size=PAGE, num_states=12, chunked_prefill_size=64)
    rig.ask("cold", IDS)
    # States are at tokens 64 and 96, and none where the two prompts part.
    report = rig.ask("branch", [*IDS[:80], *prompt(2, 40)])
    assert cuts_of(report) == [("device", 64, "no_state")]
    assert cuts_of(rig.ask("whole", IDS[:96]))[-1][1:] == (80, "last_token")


def test_a_missing_last_page_is_reported_where_states_are_windows(
    tiny_model: Callable[..., Path],
) -> None:
    """A whole prompt computes one token there, so that its last page is worth having."""
    rig = ReportRig(tiny_model("ministral", eos_token_id=None), page_size=PAGE, num_states=12)
    rig.ask("cold", IDS[:80])
    assert cuts_of(rig.ask("longer", IDS[:96])) == [("device", 80, "no_page")]
    assert cuts_of(rig.ask("whole", IDS[:96])) == [(None, 96, "last_token")]


def test_no_slot_for_a_state_to_load(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = tiered(hybrid, num_states=12, chunked_prefill_size=64)
    try:
        rig.ask("cold", IDS)
        rig.tree.evict(EvictParams(num_tokens=1000, mamba_num=12))
        monkeypatch.setattr(rig.scheduler.state.snapshots, "room_to_load", lambda decoding: 0)
        report = rig.ask("warm", IDS)
        assert ("host", 0, "no_state_memory") in cuts_of(report)
    finally:
        rig.close()


# ---- L3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("harm", "reason"), [("damaged", "damaged"), ("gone", "miss")])
def test_a_page_of_the_store_is_bad(
    rig: ReportRig, storage_dir: Path, harm: str, reason: str
) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    path = page_file(storage_dir, IDS, 3)
    if harm == "damaged":
        raw = bytearray(path.read_bytes())
        raw[5] ^= 1
        path.write_bytes(raw)
    else:
        path.unlink()
    report = rig.ask("warm", IDS)
    assert found(report) == (0, 0, 48, 96 if harm == "damaged" else 48)
    assert cuts_of(report) == [
        ("device", 0, "no_page"), ("host", 48, "no_page"), ("storage", 48, reason),
    ]  # fmt: skip


def test_not_worth_a_read(model: Path) -> None:
    rig = tiered(model, threshold=5 * PAGE, pool_tokens=2048)
    try:
        rig.ask("cold", IDS)
        rig.flush()
        short = rig.ask("short", IDS[:65])
        assert cuts_of(short)[-1] == ("storage", 0, "too_short")
        rig.flush()
        few = rig.ask("few", [*IDS[:64], *prompt(2, 64)])
        assert (few.storage, cuts_of(few)[-1]) == (64, ("storage", 0, "revoked"))
    finally:
        rig.close()


def test_late_pages_are_reported(model: Path) -> None:
    extra = {"prefetch_threshold": PAGE, "prefetch_timeout_base": 0, "prefetch_timeout_max": 0}
    rig = tiered(
        model,
        pool_tokens=2048,
        hicache_storage_prefetch_policy="timeout",
        hicache_storage_backend_extra_config=json.dumps(extra),
    )
    try:
        rig.ask("cold", IDS)
        rig.flush()
        with HeldReads(rig.hi, calls=0) as reads:
            rig.step(rig.request("warm", IDS, return_cache_report=True))
            deadline = time.monotonic() + 30
            while rig.results.get("warm") is None:
                assert time.monotonic() < deadline
                rig.wait_a_tick()
            reads.open()
            rig.settle()
        assert ("storage", 0, "late") in cuts_of(rig.report("warm"))
    finally:
        rig.close()


def test_slower_reads_are_reported(rig: ReportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    cost = rig.hi.storage_prefetch.cost_model
    with monkeypatch.context() as patch:
        patch.setattr(cost, "may_begin", lambda *args: False)
        slower = rig.ask("slower", IDS)
    assert cuts_of(slower)[-1] == ("storage", 0, "slower_than_computing")
    rig.flush()
    with HeldReads(rig.hi, calls=0) as reads:
        rig.step(rig.request("overtaken", IDS, return_cache_report=True))
        (read,) = rig.hi.storage_prefetch.table.reads
        read.cancel()
        reads.open()
        rig.settle()
    assert ("storage", 0, "overtaken") in cuts_of(rig.report("overtaken"))


def test_the_store_is_left_alone(rig: ReportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    attached = rig.hi.store.attached
    assert attached is not None
    assert attached.client is not None

    def fail(*args: Any, **fields: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(attached.client, "prompts_exist", fail)
    # The pause never ends, however slow the machine is.
    monkeypatch.setattr(attached.breaker, "_clock", lambda: 0.0)
    asked = rig.ask("asked", IDS)
    assert cuts_of(asked)[-1] == ("storage", 0, "failed")
    rig.flush()
    left = rig.ask("left alone", IDS)
    assert cuts_of(left)[-1] == ("storage", 0, "unavailable")


def test_a_lack_of_room_in_l2_is_reported(rig: ReportRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    with monkeypatch.context() as patch:
        patch.setattr(storage_prefetch, "PREFETCH_SHARE", 0.0)
        full = rig.ask("queue", IDS)
    assert cuts_of(full)[-1] == ("storage", 0, "queue_full")
    rig.flush()
    with monkeypatch.context() as patch:
        share = 3.5 * PAGE / rig.hi.host_pool.size
        patch.setattr(storage_prefetch, "PREFETCH_SHARE", share)
        part = rig.ask("part", IDS)
    # Two reads, one after the other.
    assert part.host == 96 and all(tier != "storage" for tier, _, _ in cuts_of(part))
    rig.flush()
    host = rig.hi.host_pool
    taken = host.alloc(host.available_size() - 2 * PAGE)
    assert taken is not None
    rig.step(rig.request("memory", IDS, greedy(1), return_cache_report=True))
    while "memory" not in rig.results:
        rig.wait_a_tick()
    host.free(taken)
    rig.settle()
    report = rig.report("memory")
    assert (report.storage, cuts_of(report)[-1]) == (32, ("storage", 32, "no_host_memory"))


def test_shared_reads_are_reported_to_each_request(rig: ReportRig) -> None:
    """One request joins the read of another; a sample starts none."""
    rig.ask("cold", IDS)
    rig.flush()
    asked: dict[str, Any] = {"return_cache_report": True}
    with HeldReads(rig.hi, calls=0) as reads:
        rig.step(
            rig.request("first", IDS, **asked),
            rig.request("joins", [*IDS[:96], 5, 6], **asked),
        )
        reads.open()
        rig.settle()
    assert [rig.report(rid).storage for rid in ("first", "joins")] == [96, 96]
    assert cuts_of(rig.report("joins"))[-1] == (None, 96, "partial_page")
    fresh = prompt(7, 100)
    rig.step(
        rig.request("one", fresh, **asked),
        rig.request("one-1", fresh, sample_of="one", **asked),
    )
    rig.settle()
    report = rig.report("one-1")
    assert (report.on_arrival, report.device) == (0, 96)
    assert cuts_of(report) == [(None, 96, "partial_page")]


def test_the_wait_for_l3_is_a_time_of_its_own(rig: ReportRig) -> None:
    rig.ask("cold", IDS)
    cold = rig.results["cold"].last
    assert cold is not None and cold.stages is not None
    assert (cold.stages.l3_wait or 0.0) < 0.1, "it waited for a look-up at most"
    rig.flush()
    state = rig.scheduler.state
    with HeldReads(rig.hi, calls=0) as reads:
        rig.step(rig.request("warm", IDS))
        req = state.queues.find("warm")
        assert req is not None
        assert req.report.l3_wait_began == state.now, "its turn has come"
        for _ in range(3):
            rig.wait_a_tick()
        assert req.report.l3_wait_began < state.now
        reads.open()
        rig.settle()
    warm = rig.results["warm"].last
    assert warm is not None and warm.stages is not None
    stages = warm.stages
    assert stages.l3_wait is not None and stages.queue is not None
    assert 0 < stages.l3_wait <= stages.queue
    assert req.report.l3_wait_began is None
    state.tree.read_metrics()
    text = state.metrics.render(state.load())
    count = 1.0 + (cold.stages.l3_wait is not None)
    assert f'per_stage_req_latency_seconds_count{{stage="l3_wait"}} {count}' in text


def test_a_traced_request_has_spans_of_its_reads_and_loads(rig: ReportRig) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    assert rig.ask("untraced", [1, 2, 3]).spans is None
    before = time.monotonic()
    rig.step(rig.request("traced", IDS, is_traced=True))
    rig.settle()
    spans = {span.name: span for span in rig.report("traced").spans or ()}
    assert list(spans) == ["match", "l3_read", "load", "prefill"] or list(spans) == [
        "match", "l3_read", "prefill", "load",
    ]  # fmt: skip
    assert [spans[name].tokens for name in ("match", "l3_read", "load", "prefill")] == [
        0, 96, 96, 4,
    ]  # fmt: skip
    assert spans["l3_read"].outcome is None
    times = [time for span in spans.values() for time in (span.begin, span.end)]
    assert before <= min(times) and max(times) <= time.monotonic()
    assert all(span.begin <= span.end for span in spans.values())
    assert spans["match"].end <= spans["l3_read"].begin <= spans["l3_read"].end
    assert spans["l3_read"].end <= spans["prefill"].end


def test_the_prefix_before_a_read_has_left_the_tree(rig: ReportRig) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    rig.ask("half", IDS[:50])
    with HeldReads(rig.hi, calls=0) as reads:
        rig.step(rig.request("orphan", IDS, return_cache_report=True))
        rig.tree.evict(EvictParams(num_tokens=1000))
        rig.hi.evict_host(1000)
        reads.open()
        rig.settle()
    report = rig.report("orphan")
    assert found(report) == (48, 0, 0, 48)
    assert cuts_of(report) == [
        ("device", 0, "evicted"), ("host", 0, "evicted"), ("storage", 48, "orphan"),
    ]  # fmt: skip


def test_reports_of_requests_that_end_early_are_forgotten(rig: ReportRig) -> None:
    rig.ask("cold", IDS)
    rig.flush()
    with HeldReads(rig.hi, calls=0):
        rig.step(rig.request("leaves", IDS, return_cache_report=True))
        assert set(rig.hi.storage_prefetch.table.reports) == {"leaves"}
        rig.step(AbortReq(rid="leaves"))
    rig.settle()
    assert not rig.hi.storage_prefetch.table.reports
    last = rig.results["leaves"].last
    assert last is not None
    assert last.cache_report is None

"""The scheduler over two and three tiers: same words from each, nothing lost in a storm."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import HeldReads, HeldStream
from rigs.caches.storage_rigs import counts
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.messages.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetHiCacheStorageReqInput,
    RequestOutput,
)
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=13, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

PAGE = 16
EXTRA = json.dumps({"prefetch_threshold": PAGE, "prefetch_timeout_base": 30})
"""A machine that stands still for seconds makes no read late."""


def make_rig(model: Path, *, storage: bool = True, **args: object) -> SchedulerRig:
    settings: dict[str, object] = {"enable_hierarchical_cache": True, "page_size": PAGE, **args}
    if storage:
        settings |= {
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": EXTRA,
            **args,
        }
    return SchedulerRig(model, **settings)  # type: ignore[arg-type]


def settle(rig: SchedulerRig) -> None:
    """Step until nothing is in flight."""
    until(rig, rig.scheduler.is_idle)
    rig.assert_clean()


def ask(rig: SchedulerRig, rid: str, ids: list[int]) -> RequestOutput:
    rig.step(rig.request(rid, ids))
    settle(rig)
    return last_of(rig, rid)


def until(rig: SchedulerRig, condition: Callable[[], bool]) -> None:
    """Step until `condition` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, rig.tree.is_busy()
        rig.wait_a_tick()


def has_ended(rig: SchedulerRig, rid: str) -> bool:
    return rid in rig.results and rig.results[rid].finish_reason is not None


def last_of(rig: SchedulerRig, rid: str) -> RequestOutput:
    """The last message about a request."""
    last = rig.results[rid].last
    assert last is not None
    return last


def hi_of(rig: SchedulerRig) -> HiRadixCache:
    """Its tree, of several tiers."""
    assert isinstance(rig.tree, HiRadixCache)
    return rig.tree


def flush(rig: SchedulerRig) -> None:
    rig.step(FlushCacheReqInput(req_id="flush"))
    assert rig.answers.pop().success


def test_every_tier_gives_the_words_of_no_cache(model: Path) -> None:
    ids = prompt(1, 100)
    cold = SchedulerRig(model, disable_radix_cache=True).generate([ids])[0]
    rig = make_rig(model)
    try:
        sources = []
        for rid in ("cold", "device"):
            sources.append(ask(rig, rid, ids).cached_tokens_details)
        # Push the prompt out of L1, not out of L2.
        for seed in range(10, 15):
            ask(rig, f"filler-{seed}", prompt(seed, 120))
        sources.append(ask(rig, "host", ids).cached_tokens_details)
        flush(rig)
        sources.append(ask(rig, "storage", ids).cached_tokens_details)
        assert [(s.device, s.host, s.storage) for s in sources] == [
            (0, 0, 0),
            (96, 0, 0),
            (0, 96, 0),
            (0, 0, 96),
        ]
        assert {s.storage_backend for s in sources} == {"HiCacheFile"}
        for rid in ("cold", "device", "host", "storage"):
            assert rig.results[rid].output_ids == cold, rid
    finally:
        rig.close()


def test_a_load_that_no_other_can_join_is_issued_before_the_rest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(self: object, *args: object, **kwargs: object) -> object:
            order.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def order_of(*seeds: int) -> list[str]:
        for seed in range(10, 15):  # Push the prompts out of L1, not out of L2.
            ask(rig, f"filler-{seed}-{seeds}", prompt(seed, 120))
        order.clear()
        rig.step(*(rig.request(f"again-{seed}-{seeds}", prompt(seed, 100)) for seed in seeds))
        issued = order.copy()
        settle(rig)
        return issued

    rig = make_rig(model, storage=False)
    try:
        for seed in (1, 2):
            ask(rig, f"first-{seed}", prompt(seed, 100))
        note(HiCacheController, "load")
        note(HiCacheController, "start_loading")
        note(PrefillScheduler, "_alloc")
        assert order_of(1) == ["load", "start_loading", "_alloc", "start_loading"]
        both = order_of(1, 2)
        assert both == ["load", "_alloc", "load", "start_loading", "_alloc", "start_loading"]
        again = [last_of(rig, f"again-{seed}-(1, 2)") for seed in (1, 2)]
        assert [one.cached_tokens_details.host for one in again] == [96, 96]
        for seed in (1, 2):
            words = rig.results[f"first-{seed}"].output_ids
            assert rig.results[f"again-{seed}-(1, 2)"].output_ids == words
    finally:
        rig.close()


def test_others_overtake_a_request_that_waits_for_storage(model: Path) -> None:
    rig = make_rig(model)
    try:
        ids = prompt(1, 100)
        ask(rig, "first", ids)
        flush(rig)
        rig.step(rig.request("waits", ids), rig.request("goes", prompt(2, 10)))
        assert rig.scheduler.state.queues.num_holders >= 1
        settle(rig)
        assert last_of(rig, "waits").cached_tokens_details.storage == 96
    finally:
        rig.close()


def test_samples_read_their_prompt_once_and_go_right_after_the_first(model: Path) -> None:
    rig = make_rig(model, pool_tokens=2048)
    try:
        ids = prompt(1, 18 * PAGE + 1)
        ask(rig, "writer", ids)
        flush(rig)
        # The samples share one read. The store admits that read's calls and no others.
        with HeldReads(hi_of(rig), pages_per_call=18, calls=1) as reads:
            samples = [f"first-{number}" for number in range(1, 5)]
            rig.step(
                rig.request("first", ids),
                *[rig.request(rid, ids, sample_of="first") for rid in samples],
            )
            settle(rig)
        assert reads.pages == 18
        details = [last_of(rig, rid).cached_tokens_details for rid in ("first", *samples)]
        assert [one.storage for one in details] == [288, 0, 0, 0, 0]
        assert [one.device for one in details] == [0, 288, 288, 288, 288]
        assert len({tuple(rig.results[rid].output_ids) for rid in ("first", *samples)}) == 1
    finally:
        rig.close()


def test_a_sample_whose_first_is_aborted_gets_what_was_being_read(model: Path) -> None:
    rig = make_rig(model, pool_tokens=2048)
    try:
        ids = prompt(1, 18 * PAGE + 1)
        ask(rig, "writer", ids)
        flush(rig)
        with HeldReads(hi_of(rig), calls=0) as reads:
            rig.step(rig.request("first", ids), rig.request("first-1", ids, sample_of="first"))
            rig.step(AbortReq(rid="first"))
            assert rig.results["first"].finish_reason is not None
            reads.open()
            settle(rig)
        assert reads.pages == 18
        assert last_of(rig, "first-1").cached_tokens_details.storage == 288
    finally:
        rig.close()


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_nobody_waits_for_a_store_that_does_not_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Neither a request that waits when it falls silent, nor one that comes then."""
    prompts = [prompt(seed, 18 * PAGE + 1) for seed in (1, 2)]
    cold = SchedulerRig(model, disable_radix_cache=True).generate(prompts)
    rig = make_rig(model, pool_tokens=2048, hicache_storage_prefetch_policy=policy)
    try:
        for number, ids in enumerate(prompts):
            ask(rig, f"writes {number}", ids)
        flush(rig)
        with HeldReads(hi_of(rig), calls=0), monkeypatch.context() as patch:
            patch.setattr(store_calls, "_SILENT_AFTER_S", 0.0)
            patch.setattr(store_calls, "_FIRST_GET_S", 0.0)
            for rid, ids in zip(("waits", "comes"), prompts, strict=True):
                rig.step(rig.request(rid, ids))
                until(rig, lambda rid=rid: has_ended(rig, rid))  # type: ignore[misc]
            assert [rig.results[rid].output_ids for rid in ("waits", "comes")] == cold
            assert last_of(rig, "waits").cached_tokens_details.storage == 0
            assert last_of(rig, "comes").cached_tokens_details.storage == 0
            assert counts(hi_of(rig).metrics.prefetch_outcomes)["unavailable"] == 1
        settle(rig)
        assert not hi_of(rig).needs_tick, "it answers"
        flush(rig)
        assert ask(rig, "last", prompts[1]).cached_tokens_details.storage == 288
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("policy", "short_of"), [("best_effort", "memory"), ("timeout", "memory"), ("timeout", "rows")]
)
def test_a_read_is_not_cut_for_a_request_that_cannot_run_yet(
    model: Path, policy: str, short_of: str
) -> None:
    """Its time is up at once, but there is no room for it until another request has ended."""
    rig = make_rig(
        model,
        pool_tokens=384 if short_of == "memory" else 2048,
        max_requests=8 if short_of == "memory" else 1,
        hicache_ratio=8.0,
        schedule_conservativeness=10.0,
        hicache_storage_prefetch_policy=policy,
        hicache_storage_backend_extra_config=json.dumps(
            {"prefetch_threshold": PAGE, "prefetch_timeout_base": 0, "prefetch_timeout_max": 0}
        ),
    )
    try:
        ids = prompt(1, 18 * PAGE + 1)
        ask(rig, "writer", ids)
        flush(rig)
        with HeldReads(hi_of(rig), pages_per_call=3, calls=1) as reads:
            rig.step(rig.request("runs", prompt(2, 20), greedy(120)), rig.request("waits", ids))
            for _ in range(20):
                rig.step()
            (read,) = hi_of(rig).storage_prefetch.table.operations
            reads.open()
            # No tick meanwhile: "runs" would end if the thread is slow.
            assert wait_until(lambda: read.landed_pages == 18, 20)
            for _ in range(3):
                rig.step()
            assert rig.scheduler.state.queues.num_holders == 1
            settle(rig)
        assert last_of(rig, "waits").cached_tokens_details.storage == 288
    finally:
        rig.close()


def test_who_is_short_of_memory_is_looked_at_again_when_copies_end(model: Path) -> None:
    """No request comes or goes meanwhile: what runs has a long way to go."""
    rig = make_rig(model, storage=False)
    controller = hi_of(rig).cache_controller
    controller._write_stream.close()
    writes = HeldStream()
    controller._write_stream = writes  # type: ignore[assignment]
    try:
        rig.step(rig.request("writes", prompt(1, 240), greedy(1)))
        until(rig, lambda: "writes" in rig.results)
        rig.step(rig.request("runs", prompt(2, 20), greedy(100)))
        rig.step(rig.request("waits", prompt(3, 240)))
        for _ in range(3):
            rig.step()
        state = rig.scheduler.state
        assert (state.queues.num_holders, len(state.queues.waiting)) == (1, 1)
        writes.run()
        for _ in range(20):
            rig.step()
        assert not state.queues.waiting
        assert "runs" in {req.rid for req in state.queues.holders()}
        writes.at_once = True
        settle(rig)
    finally:
        rig.close()


def test_a_load_is_waited_for_though_its_request_was_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1, 100)
    cold = SchedulerRig(model, disable_radix_cache=True).generate([ids])[0]
    rig = make_rig(model, storage=False)
    try:
        ask(rig, "writer", ids)
        rig.tree.evict(EvictParams(num_tokens=1000))
        controller = hi_of(rig).cache_controller
        controller._load_stream.close()
        loads = HeldStream()
        controller._load_stream = loads  # type: ignore[assignment]
        worker, prefill = rig.scheduler._resources.worker, rig.scheduler._prefill
        assert isinstance(prefill, PrefillScheduler)
        forward, alloc = worker.forward_batch_generation, prefill._alloc
        refusals = [True]
        waited_for: list[bool] = []

        def refuse_once(*args: Any, **kwargs: Any) -> Any:
            return None if refusals and refusals.pop() else alloc(*args, **kwargs)

        def forward_that_waits(batch: ModelWorkerBatch) -> Any:
            waited_for.append(batch.hicache_consumer_index != -1)
            if waited_for[-1]:
                loads.run()
            return forward(batch)

        monkeypatch.setattr(prefill, "_alloc", refuse_once)
        monkeypatch.setattr(worker, "forward_batch_generation", forward_that_waits)
        rig.step(rig.request("refused", ids))
        assert (refusals, waited_for, rig.tree.is_busy()) == ([], [], {"loads": 1})
        until(rig, lambda: bool(waited_for))
        assert waited_for == [True]
        settle(rig)
        assert last_of(rig, "refused").cached_tokens_details.device == 96
        assert rig.results["refused"].output_ids == cold
    finally:
        rig.close()


class SlowParts:
    """Makes L3 and the model of a rig take so much longer that it is known which is faster."""

    def __init__(self, rig: SchedulerRig, *, read_s: float, compute_s: float) -> None:
        """Args:
        read_s: For each token read.
        compute_s: For each token of a prompt.
        """
        attached = hi_of(rig).store.attached
        assert attached is not None and attached.client is not None
        self._get = attached.client.batch_get_v2
        self._forward = rig.scheduler._resources.worker.forward_batch_generation
        self._seconds = read_s, compute_s
        attached.client.batch_get_v2 = self._slow_get  # type: ignore[method-assign]
        rig.scheduler._resources.worker.forward_batch_generation = (  # type: ignore[method-assign]
            self._slow_forward
        )

    def _slow_get(self, transfers: Any, extra_info: Any = None) -> Any:
        time.sleep(self._seconds[0] * len(transfers[0].host_indices))
        return self._get(transfers, extra_info)

    def _slow_forward(self, batch: ModelWorkerBatch) -> Any:
        if batch.forward.forward_mode.is_extend():
            time.sleep(self._seconds[1] * len(batch.forward.input_ids))
        return self._forward(batch)


@pytest.mark.parametrize("policy", ["timeout", "wait_complete"])
def test_a_burst_is_divided_between_a_slow_store_and_the_model(model: Path, policy: str) -> None:
    rig = make_rig(model, pool_tokens=2048, hicache_storage_prefetch_policy=policy)
    try:
        prompts = {f"burst-{seed}": prompt(seed, 100) for seed in range(10)}
        cold = SchedulerRig(model, disable_radix_cache=True, pool_tokens=2048)
        words = dict(zip(prompts, cold.generate(prompts.values()), strict=True))
        # Computing costs more than twice as much as reading: alone every prompt is read.
        SlowParts(rig, read_s=0.0004, compute_s=0.001)
        for rid, ids in prompts.items():
            ask(rig, f"computed-{rid}", ids)
        flush(rig)
        for seed in range(5):
            alone = ask(rig, f"read-{seed}", prompts[f"burst-{seed}"])
            assert alone.cached_tokens_details.storage == 96
        flush(rig)
        rig.step(*[rig.request(rid, ids) for rid, ids in prompts.items()])
        settle(rig)
        assert {rid: rig.results[rid].output_ids for rid in prompts} == words
        from_store = [last_of(rig, rid).cached_tokens_details.storage for rid in prompts]
        read, computed = from_store.count(96), from_store.count(0)
        assert read + computed == 10
        overtaken = rig.scheduler.state.metrics.registry.get_sample_value(
            "sglang:hicache_prefetch_total", {"reason": "overtaken"}
        )
        if policy == "wait_complete":
            assert (read, overtaken) == (10, None)
        else:
            # Seven and three, if nothing but the model and the store took time.
            assert computed == overtaken
            assert 1 <= computed <= 8, from_store
    finally:
        rig.close()


def test_administration_is_refused_while_busy_and_works_when_idle(model: Path) -> None:
    rig = make_rig(model, storage=False)
    attach = AttachHiCacheStorageReqInput(
        req_id="attach",
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config_json=EXTRA,
    )
    try:
        rig.step(rig.request("r", prompt(1, 40), greedy(20)), attach)
        assert not rig.answers[-1].success
        rig.step(attach, ClearHiCacheReqInput(req_id="clear"))
        assert [answer.success for answer in rig.answers[-2:]] == [False, False]
        assert "running 1" in rig.answers[-1].message
        settle(rig)
        rig.step(attach)
        settle(rig)
        assert rig.answers[-1].success, rig.answers[-1].message
        rig.step(GetHiCacheStorageReqInput(req_id="get"))
        assert rig.answers[-1].data["hicache_storage_backend"] == "file"
        for _ in range(2):
            rig.step(DetachHiCacheStorageReqInput(req_id="detach"))
            settle(rig)
            assert (rig.answers[-1].req_id, rig.answers[-1].success) == ("detach", True)
        rig.step(GetHiCacheStorageReqInput(req_id="get"))
        assert rig.answers[-1].data["hicache_storage_backend"] is None
    finally:
        rig.close()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_storm_of_aborts_under_tight_memory_loses_nothing(model: Path, write_policy: str) -> None:
    rng = random.Random(write_policy)
    rig = make_rig(
        model,
        pool_tokens=12 * PAGE,
        max_requests=4,
        chunked_prefill_size=2 * PAGE,
        hicache_ratio=1.5,
        hicache_write_policy=write_policy,
        schedule_conservativeness=0.01,
    )
    prefixes = [prompt(seed, 64) for seed in range(3)]
    sent: dict[str, list[int]] = {}
    try:
        for number in range(60):
            ids = rng.choice(prefixes)[: rng.randint(1, 64)] + prompt(number, rng.randint(1, 60))
            rid = f"r{number}"
            sent[rid] = ids
            rig.step(rig.request(rid, ids, greedy(rng.randint(1, 40))))
            for _ in range(rng.randint(0, 6)):
                rig.step()
                rig.check()
            if rng.random() < 0.6:
                rig.step(AbortReq(rid=f"r{rng.randint(0, number)}"))
                rig.check()
        settle(rig)
        assert set(rig.results) == set(sent), "every request was answered"
        finished = [
            rid
            for rid, got in rig.results.items()
            if got.finish_reason is not None and got.finish_reason.type == "length"
        ]
        assert 10 < len(finished) < 60
        reference = SchedulerRig(
            model, disable_radix_cache=True, pool_tokens=8192, max_requests=len(finished)
        )
        lengths = [len(rig.results[rid].output_ids) for rid in finished]
        longest = reference.generate([sent[rid] for rid in finished], max(lengths))
        for rid, words, length in zip(finished, longest, lengths, strict=True):
            assert words[:length] == rig.results[rid].output_ids, rid
    finally:
        rig.close()

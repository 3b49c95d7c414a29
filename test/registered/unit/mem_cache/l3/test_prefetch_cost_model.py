"""Reads that are begun or cut, by the agreement of the ranks and the waiting requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.caches.memory_ranks import MemoryExchange
from sglang.srt.mem_cache.base_prefix_cache import Workload
from sglang.srt.mem_cache.hicache_storage import CacheOutcome
from sglang.srt.mem_cache.l3.prefetch_cost import PrefetchCostModel
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation, PrefetchPolicy, PrefetchTable
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tick_sync import PrefetchProgress, Rates
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PAGE = 10
ASKED = 1000
EQUAL = Rates(1000, 1000)
TIMEOUT = PrefetchPolicy.TIMEOUT


class Queue:
    """A cost model over its own table, and the tokens that its scheduler has to compute."""

    def __init__(self, rates: Rates = EQUAL) -> None:
        self.table = PrefetchTable(PAGE)
        self.model = PrefetchCostModel(self.table, PAGE)
        self.rates = rates
        self.computing = 0
        self.waiting: dict[str, int] = {}
        self.looks = 0
        self.model.workload = self._look

    def _look(self) -> Workload:
        self.looks += 1
        return Workload(self.computing, self.waiting)

    def comes(self, *rids: str, uncached: int = ASKED) -> None:
        """Add requests with `uncached` tokens that no local tier has; each asks L3 for `ASKED`."""
        for rid in rids:
            self.waiting[rid] = uncached
            self.table.start(
                PrefetchOperation(
                    request_id=rid,
                    key=RadixKey([]),
                    start=0,
                    host_indices=torch.arange(ASKED),
                    hashes=[PageHash("")] * (ASKED // PAGE),
                    prefix_hashes=[],
                    deadline=1e9,
                    epoch=0,
                )
            )

    def agree(self, **progress: PrefetchProgress) -> None:
        """Agree on the ranks' progress; requests that are not named have none."""
        self.table.agree(
            [progress.get(one.request_id, PrefetchProgress()) for one in self.table.operations]
        )

    def cut(self, policy: PrefetchPolicy = TIMEOUT) -> list[str]:
        return [one.request_id for one in self.model.cancel_slower(policy, self.rates)]


def test_what_is_cut_goes_on_at_once_and_is_computed_before_those_that_come_later() -> None:
    queue = Queue()
    queue.comes("a", "b")
    assert queue.cut() == ["b"]
    assert [queue.table.may_schedule(rid, TIMEOUT) for rid in "ab"] == [False, True]
    assert queue.cut() == [], "once"
    queue.comes("c", "d")
    # c is read behind a, while b is computed; d would be read behind both.
    assert queue.cut() == ["d"]
    queue.waiting |= {"b": 0, "d": 0}
    assert queue.cut() == ["c"], "nothing but itself would be computed"


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.WAIT_COMPLETE])
def test_other_policies_cut_nothing(policy: PrefetchPolicy) -> None:
    queue = Queue(Rates(10, 1000))
    queue.comes("a", "b")
    assert queue.cut(policy) == []
    assert queue.cut() == ["a", "b"]


def test_what_has_landed_is_neither_to_read_nor_to_compute() -> None:
    queue = Queue(Rates(500, 1000))
    queue.comes("a", "b")
    landed = PrefetchProgress(hit=100, landed=80)
    queue.computing = 1450
    queue.agree(a=landed)
    # The tokens to read are 200 and 1000, those to compute 1450 and 1000.
    assert queue.cut() == []
    queue.computing = 850
    assert queue.cut() == ["b"]
    queue.waiting["b"] = 0
    assert queue.model.uncached("a", 1000) == 0, "L3 brings it"
    queue.agree(a=landed._replace(ended=True))
    assert queue.model.uncached("a", 1000) == 200
    assert queue.model.uncached("of no read", 1000) == 1000


def test_what_the_store_lacks_is_not_waited_for() -> None:
    queue = Queue(Rates(1000, 1000))
    queue.comes("a", "b")
    queue.agree(a=PrefetchProgress(hit=0, ended=True))
    assert queue.cut() == []
    queue.comes("c")
    queue.agree(a=PrefetchProgress(hit=0, ended=True), b=PrefetchProgress(hit=10))
    assert queue.cut() == [], "b reads a hundred tokens, and a's thousand are computed first"


def test_the_call_under_way_of_one_that_was_cut_still_takes_time() -> None:
    queue = Queue(Rates(700, 1000))
    queue.comes("a")
    assert queue.cut() == ["a"]
    queue.agree(a=PrefetchProgress(hit=100, handed=100))
    assert queue.model.abandoned_tokens() == 500, "half of it, by and large"
    queue.waiting["a"] = 500
    queue.comes("b")
    assert queue.cut() == ["b"]
    queue.agree(a=PrefetchProgress(hit=100, handed=100, ended=True))
    assert queue.model.abandoned_tokens() == 0
    queue.waiting["b"] = 0
    queue.comes("c")
    assert queue.cut() == []


def test_every_32nd_read_given_up_is_made_after_all_and_to_its_end() -> None:
    queue = Queue(Rates(1, 1000))
    spared = []
    for number in range(84):
        rid = f"r{number}"
        queue.comes(rid)
        queue.waiting.clear()
        if queue.cut() != [rid]:
            spared.append(number)
            assert queue.cut() == [], "neither now nor later"
    assert spared == [31, 63]
    # One that lands says how fast reads are: no need to try for as long.
    queue.model.given_up = 0
    queue.table = queue.model._table = PrefetchTable(PAGE)
    for number in range(31):
        queue.comes(f"s{number}")
        queue.waiting.clear()
        assert queue.cut() == [f"s{number}"]


def begun(queue: Queue, count: int, policy: PrefetchPolicy = TIMEOUT) -> int:
    queue.model.waiting = None
    return sum(queue.model.may_begin(f"new{n}", ASKED, policy, queue.rates) for n in range(count))


def test_hopeless_reads_are_not_begun_but_for_every_32nd() -> None:
    queue = Queue(Rates(100, 1000))
    assert [begun(queue, 1) for _ in range(64)] == ([0] * 31 + [1]) * 2
    assert begun(queue, 1, PrefetchPolicy.WAIT_COMPLETE) == 1, "who waits to the end gets it"
    queue.rates = Rates()
    assert begun(queue, 3) == 3


def test_behind_a_long_queue_a_slow_store_is_good_enough() -> None:
    queue = Queue(Rates(400, 1000))
    assert begun(queue, 1) == 0
    queue.waiting = {"new0": ASKED}
    assert begun(queue, 1) == 0, "what it waits for is not what it is itself"
    queue.waiting["other"] = 500
    assert begun(queue, 1) == 1
    # Requests of one tick queue behind those whose reads are not begun. One look serves them all.
    queue.waiting, queue.looks = {}, 0
    assert begun(queue, 3) == 2
    assert queue.looks == 1


# ---- a silent store --------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("policy", [PrefetchPolicy.WAIT_COMPLETE, TIMEOUT])


def silenced(queue: Queue, silence_ms: int, policy: PrefetchPolicy = TIMEOUT) -> list[str]:
    cut = queue.model.cancel_unanswered(policy, queue.rates, silence_ms)
    return [one.request_id for one in cut]


@BOTH
def test_nobody_waits_for_a_silent_store_longer_than_computing_takes(
    policy: PrefetchPolicy,
) -> None:
    queue = Queue(Rates(1000, 1000))
    queue.computing = 500
    queue.comes("a", "b")
    # The thousand tokens of a take a second behind the 500, those of b as long.
    assert silenced(queue, 0, policy) == []
    assert silenced(queue, 1500, policy) == []
    assert silenced(queue, 1501, policy) == ["a"], "b would be computed behind it"
    assert [queue.table.may_schedule(rid, policy) for rid in "ab"] == [True, False]
    assert silenced(queue, 2500, policy) == []
    assert silenced(queue, 2501, policy) == ["b"]


@BOTH
def test_without_a_rate_of_prefills_any_silence_is_too_long(policy: PrefetchPolicy) -> None:
    queue = Queue(Rates(reads=1000))
    queue.comes("a")
    assert silenced(queue, 501, policy) == ["a"]
    queue.model.waiting = None
    assert queue.model.is_hopeless("b", ASKED, policy, queue.rates, 501)
    assert not queue.model.is_hopeless("b", ASKED, policy, queue.rates, 0)


def test_a_read_that_measures_is_cut_in_a_silence_too() -> None:
    queue = Queue()
    queue.comes("a")
    (read,) = queue.table.reads
    read.is_probe = True
    assert silenced(queue, 1001) == ["a"]
    assert queue.model.given_up == 0, "a silence says nothing of rates"


def test_best_effort_waits_for_nothing_and_so_cuts_nothing() -> None:
    queue = Queue()
    queue.comes("a")
    assert silenced(queue, 99_999, PrefetchPolicy.BEST_EFFORT) == []
    assert not queue.model.is_hopeless("b", 1, PrefetchPolicy.BEST_EFFORT, queue.rates, 99_999)


def test_requests_of_a_silence_queue_behind_those_that_do_not_wait() -> None:
    queue = Queue()
    waits = [not queue.model.is_hopeless(f"n{n}", ASKED, TIMEOUT, EQUAL, 1500) for n in range(3)]
    assert waits == [False, True, True], "the second would be computed after two seconds"
    assert queue.looks == 1


@BOTH
def test_a_hang_of_six_seconds_costs_few_requests_a_quarter_of_a_second(
    policy: PrefetchPolicy,
) -> None:
    """A tick each 10 ms, and a request each 100 ms, which the device computes in 50 ms."""
    queue, tokens = Queue(Rates(reads=100_000, prefills=20 * ASKED)), ASKED
    came: dict[str, int] = {}
    waited: list[int] = []
    for now in range(0, 6000, 10):
        silence = now if now > 250 else 0
        queue.model.waiting = None
        if now % 100 == 0:
            rid = f"r{now}"
            if queue.model.is_hopeless(rid, tokens, policy, queue.rates, silence):
                waited.append(0)
            else:
                queue.comes(rid)
                came[rid] = now
        cut = silenced(queue, silence, policy)
        waited += [now - came.pop(rid) for rid in cut]
        for rid in cut:
            queue.table.leave(rid)
            del queue.waiting[rid]  # Computed before the next request comes.
        queue.agree()
    assert not came
    assert len(waited) == 60
    assert [one for one in waited if one] == [260, 160, 60]


# ---- two ranks -----------------------------------------------------------------------------------


class TwoRanks:
    """Two engines that agree once a tick, each with a store and with rates of its own."""

    def __init__(self, rates: list[Rates]) -> None:
        settings = HiCacheSettings(
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="timeout",
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 4}),
        )
        self.rigs = [CacheRig(settings=settings) for _ in rates]
        exchange = MemoryExchange(len(rates), deadline_s=60)
        self._pool = ThreadPoolExecutor(len(rates))
        for rank, (rig, known) in enumerate(zip(self.rigs, rates, strict=True)):
            rig.hi._destroy_prefetch_sync_groups()
            rig.hi._group = rig.hi._sync._group = exchange.group(rank)
            rig.hi._create_prefetch_sync_groups()
            attached = rig.hi.store.attached
            assert attached is not None
            for _ in range(4):
                attached.read_rate.add(known.reads, 1.0)
                attached.prefill_rate.add(known.prefills, 1.0)

    def tick(self) -> None:
        list(self._pool.map(CacheRig.tick, self.rigs))

    def until(self, condition: Callable[[CacheRig], bool]) -> None:
        deadline = time.monotonic() + 60
        while not all(map(condition, self.rigs)):
            assert time.monotonic() < deadline, [rig.hi.is_busy() for rig in self.rigs]
            self.tick()
            time.sleep(0.001)

    def write_and_forget(self, prompts: Iterable[list[int]]) -> None:
        """Let L3 have all of `prompts`, and L1 and L2 nothing."""
        for ids in prompts:
            for rig in self.rigs:
                request, _ = rig.admit("writer", ids)
                rig.finish(request)
            self.until(lambda rig: not rig.hi.is_busy())
        for rig in self.rigs:
            rig.hi.reset()
            rig.allocator.clear()

    def close(self) -> None:
        self._pool.shutdown()
        for rig in self.rigs:
            rig.close()


def hold_gets(rig: CacheRig, goes_on: threading.Event) -> None:
    """Reads of `rig` hang until `goes_on`."""
    attached = rig.hi.store.attached
    assert attached is not None and attached.client is not None
    get = attached.client.batch_get_v2

    def held(*args: object) -> Mapping[str, object]:
        assert goes_on.wait(60)
        return get(*args)  # type: ignore[arg-type]

    attached.client.batch_get_v2 = held  # type: ignore[method-assign, assignment]


def test_ranks_whose_rates_and_progress_differ_cut_the_same_reads() -> None:
    # Alone the first would cut every read, the second none.
    ranks = TwoRanks([Rates(reads=100, prefills=4000), Rates(reads=10_000, prefills=1000)])
    first, second = ranks.rigs
    prompts = {"a": list(range(17)), "b": list(range(100, 133))}
    goes_on = threading.Event()
    try:
        ranks.write_and_forget(prompts.values())
        hold_gets(first, goes_on)
        # Reads take 0.08 to 0.16 s for a and 0.16 to 0.32 s more for b, even if half of a call is
        # done. The prefills take 0.136 s and 0.152 s, with the work before them.
        computing = 120
        for rig in ranks.rigs:
            rig.hi.watch_workload(lambda: Workload(computing, {}))
            rig.arrive("a", prompts["a"])
        operation = second.hi.storage_prefetch.table.operations[0]
        ranks.until(lambda rig: rig is first or operation.outcome is not None)
        for _ in range(3):
            ranks.tick()
            assert [rig.hi.check_prefetch_progress("a") for rig in ranks.rigs] == [False, False]
        computing = 10_000
        for rig in ranks.rigs:
            rig.arrive("b", prompts["b"])
        computing = 120
        for _ in range(3):
            ranks.tick()
            assert [
                rig.hi.storage_prefetch.table.may_schedule("b", TIMEOUT) for rig in ranks.rigs
            ] == [True] * 2
            assert [
                rig.hi.storage_prefetch.table.may_schedule("a", TIMEOUT) for rig in ranks.rigs
            ] == [False] * 2
        computing = 0
        ranks.tick()
        # One has read all of both; as the other has not, none uses any of it.
        assert [rig.hi.check_prefetch_progress(rid) for rid in "ab" for rig in ranks.rigs] == [
            True
        ] * 4
        assert [rig.hi.pop_prefetch_loaded_tokens(rid) for rid in "ab" for rig in ranks.rigs] == [
            0
        ] * 4
        for rid in "ab":
            for rig in ranks.rigs:
                rig.hi.note_scheduled(rid)
        goes_on.set()
        ranks.until(lambda rig: not rig.hi.is_busy())
        for rig in ranks.rigs:
            rig.hi.check_integrity()
            assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
        counted = first.hi.metrics.prefetch_outcomes.labels("overtaken")
        ranks.until(lambda rig: counted._value.get() == 2)
        assert operation.outcome is CacheOutcome.LANDED, "it had, before it was cut"
    finally:
        goes_on.set()
        ranks.close()


def test_ranks_of_which_one_reads_faster_let_those_who_joined_go_at_the_same_tick() -> None:
    ranks = TwoRanks([Rates(), Rates()])
    shared = list(range(16))
    prompts = {"a": [*shared, *range(100, 109)], "b": [*shared, *range(200, 209)]}
    goes_on = threading.Event()
    try:
        ranks.write_and_forget(prompts.values())
        hold_gets(ranks.rigs[0], goes_on)
        for rig in ranks.rigs:
            for rid, ids in prompts.items():
                rig.arrive(rid, ids)
        fast = ranks.rigs[1].hi.storage_prefetch.table.operations
        ranks.until(
            lambda rig: rig is ranks.rigs[0] or all(one.outcome is not None for one in fast)
        )
        for _ in range(3):
            ranks.tick()
            may = [rig.hi.check_prefetch_progress("b") for rig in ranks.rigs]
            assert may == [False, False]
        for rig in ranks.rigs:
            rig.hi.release_aborted_request("a")
        goes_on.set()
        deadline = time.monotonic() + 60
        while not any(may):
            assert time.monotonic() < deadline
            ranks.tick()
            may = [rig.hi.check_prefetch_progress("b") for rig in ranks.rigs]
        assert may == [True, True]
        assert [rig.hi.pop_prefetch_loaded_tokens("b") for rig in ranks.rigs] == [24, 24]
        ranks.until(lambda rig: not rig.hi.is_busy())
        for rig in ranks.rigs:
            rig.hi.check_integrity()
    finally:
        goes_on.set()
        ranks.close()

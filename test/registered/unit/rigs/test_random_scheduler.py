"""A slice of the random driver that runs with every change, and proof that its parts can fail.

The night's run is `test_random_scheduler_nightly.py` beside this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rigs.caches.host_damage import flip, host_pages, pool_of
from rigs.caches.storage_rigs import counts
from rigs.nightly_cases import nightly
from rigs.schedulers.checkable_model import WrongContext, words
from rigs.schedulers.checkable_worker import CheckableRig, CheckableWorker
from rigs.schedulers.random_checks import assert_stored
from rigs.schedulers.random_scheduler import RandomScheduler, run_seed
from rigs.schedulers.random_setup import Setup, impatient
from rigs.schedulers.scheduler_rig import greedy
from rigs.schedulers.step_watchdog import StepHangs, Watchdog
from rigs.stores import chaotic_store, object_store
from rigs.stores.chaotic_store import InPlaceStore
from rigs.stores.object_store import (
    FILE,
    IN_PLACE,
    MOODS,
    PLAIN,
    STORE_KEY,
    Call,
    Mood,
    ObjectFolder,
    ObjectStore,
)
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.layers.penalties import MinNewTokens
from sglang.srt.managers.scheduler.launched_step import StepResult
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.tokenizer.dp_groups import DPGroups
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.mem_cache.l3.storage_backup import StorageBackup
from sglang.srt.mem_cache.l3.storage_writes import StorageOperation
from sglang.srt.mem_cache.storage import base
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    FlushCacheReqInput,
    ToScheduler,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=11, suite="base-a-test-cpu")

PAGE = 4
PROMPT = [*range(1, 31)]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with impatient():
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call to L3 counts as stuck because the machine is slow."""
    monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 20.0)
    monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 20.0)


@pytest.fixture(name="store")
def make_store() -> Iterator[ObjectStore]:
    with ObjectStore(1) as store:
        yield store


def store_of(backend: str) -> ObjectStore:
    """The objects of a backend."""
    return ObjectFolder(1) if backend == FILE else ObjectStore(1)


def make_rig(**args: Any) -> CheckableRig:
    args["enable_hierarchical_cache"] = "hicache_ratio" in args
    return CheckableRig(BUILTIN_MODEL_DIR, pool_tokens=16 * PAGE, page_size=PAGE, **args)


def attach(
    rig: CheckableRig, store: ObjectStore, backend: str, prefetch_threshold: int = PAGE
) -> None:
    config = {STORE_KEY: store.name, "prefetch_threshold": prefetch_threshold}
    administer(
        rig,
        AttachHiCacheStorageReqInput(
            req_id="attach",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config_json=json.dumps(config),
            hicache_storage_prefetch_policy="wait_complete",
        ),
    )


def administer(rig: CheckableRig, message: ToScheduler) -> None:
    rig.step(message)
    deadline = time.monotonic() + 60
    while not rig.answers:
        assert time.monotonic() < deadline, f"no answer to {message}"
        rig.wait_a_tick()
    answer = rig.answers.pop()
    assert answer.success, answer.message


def ask(rig: CheckableRig, rid: str, seed: int = 1) -> tuple[list[int], int]:
    """Output of the prompt, and the number of its tokens that came from L3."""
    rig.step(rig.request(rid, PROMPT, greedy(6), seed=seed))
    settle(rig)
    got = rig.results[rid]
    assert got.last is not None
    return got.output_ids, got.last.cached_tokens_details.storage


def settle(rig: CheckableRig) -> None:
    deadline = time.monotonic() + 60
    while not rig.scheduler.is_idle():
        assert time.monotonic() < deadline, rig.tree.is_busy()
        rig.wait_a_tick()
    rig.assert_clean()


def flush(rig: CheckableRig) -> None:
    administer(rig, FlushCacheReqInput(req_id="flush"))


@pytest.mark.parametrize("seed", [*range(8), *map(nightly, range(8, 16))])
def test_random_work_gives_right_words_and_leaves_nothing_behind(seed: int) -> None:
    outcome = run_seed(seed, steps=150)
    assert outcome.counts["positions checked"] > 100


def test_a_verification_may_reach_a_position_where_the_one_before_had_no_slot() -> None:
    assert RandomScheduler(3095, num_groups=1).run(150).counts["positions checked"] > 100


@pytest.mark.parametrize("name", ["removed", "stored"])
def test_a_page_that_a_group_does_not_report_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = RandomScheduler(20, num_groups=2)
    assert run._door.method == "auto"
    monkeypatch.setattr(HeldPages, name, lambda *_: None)
    with pytest.raises(AssertionError, match="pages of group"):
        run.run(300)


def test_a_load_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPGroups, "computed", lambda *_: None)
    with pytest.raises(AssertionError, match=r"\(0, 0, [1-9]"):
        RandomScheduler(2, num_groups=2).run(150)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "told"),
    [
        # Drafts are accepted behind tokens that the next ones depend on.
        (Req, "is_sampled_by_history", False, "word .* is .* and not|continues the output"),
        (MinNewTokens, "apply_", lambda *_: None, "ended after|and not"),
        (StepResult, "logprob", lambda self, row: self._logprobs[0], "wrong logprobs of its out"),
    ],
)
def test_wrong_sampling_of_verified_drafts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: object, told: str
) -> None:
    drawn = Setup.draw(random.Random(0))
    setup = dataclasses.replace(drawn, tiers=1, num_draft_tokens=4, most_lag_s=0.0)
    setup = dataclasses.replace(setup, max_requests=4, max_queued=1000, damages_l2=False)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match=told):
        RandomScheduler(0, setup).run(3000)


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: RandomScheduler) -> None:
        run.rig.scheduler.state.counters.ticks //= 0

    monkeypatch.setattr(RandomScheduler, "_busy_time", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        run_seed(7, steps=100)
    notes = "\n".join(caught.value.__notes__)
    assert "python -m rigs.schedulers.random_scheduler --seed 7 --steps 100" in notes
    assert "page_size=" in notes


def test_a_step_that_hangs_is_ended_with_all_stacks() -> None:
    ended = threading.Event()
    beside = threading.Thread(target=ended.wait, name="beside", daemon=True)
    beside.start()
    with Watchdog() as watchdog, watchdog.within(0.05), pytest.raises(StepHangs) as caught:
        threading.Event().wait(20)
    ended.set()
    assert "beside:" in str(caught.value) and "MainThread:" in str(caught.value)


# ---- the model ---------------------------------------------------------------------------------


def test_the_model_says_what_its_prompt_and_seed_say() -> None:
    rig = make_rig(chunked_prefill_size=2 * PAGE)
    assert ask(rig, "cold") == ask(rig, "cached") == (words(PROMPT, 1, 6), 0)
    assert words(PROMPT, 2, 6) != words(PROMPT, 1, 6)
    assert words(PROMPT + words(PROMPT, 1, 1), 1, 5) == words(PROMPT, 1, 6)[1:]


@pytest.mark.parametrize("part", ["k_buffer", "v_buffer"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_changed_value_is_named(layer: int, part: str) -> None:
    rig = make_rig()
    ask(rig, "first")
    slot = int(rig.tree.all_values_flatten()[5])
    bits = getattr(rig.worker.token_to_kv_pool, part)[layer].view(torch.int32)
    bits[slot, 0, 1] ^= 1
    name = {"k_buffer": "keys", "v_buffer": "values"}[part]
    with pytest.raises(
        WrongContext, match=rf"layer {layer}, {name}, position 5 of \d+ \(slot {slot}"
    ):
        ask(rig, "second")


def test_a_shared_page_that_is_written_while_another_reads_it_shows() -> None:
    rig = make_rig()
    for rid in ("cold", "warm"):
        rig.run(rig.request(rid, PROMPT[:28], greedy(2), seed=1))
    assert isinstance(rig.worker, CheckableWorker) and rig.worker.num_whole == 1
    prefill = rig.scheduler._prefill
    assert isinstance(prefill, PrefillScheduler)
    prefill._padding_slot += int(rig.tree.all_values_flatten()[27])
    both = [rig.request(rid, PROMPT[:28], greedy(2), seed=1) for rid in ("writes", "reads")]
    with pytest.raises(WrongContext, match="a slot is written that a context of the batch has"):
        rig.run(*both)


def test_kv_of_another_extra_key_shows() -> None:
    rig = make_rig()
    ask(rig, "first", seed=1)
    with pytest.raises(WrongContext, match="position 0"):
        ask(rig, "second", seed=2)


# ---- the store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [PLAIN, IN_PLACE, FILE])
@pytest.mark.parametrize("mood", ["well", "rotten", "refusing", "forgetful", "failing", "full"])
def test_words_are_right_whatever_the_store_does(backend: str, mood: str) -> None:
    rig = make_rig(hicache_ratio=4.0)
    with store_of(backend) as store, contextlib.closing(rig):
        attach(rig, store, backend)
        store.set_mood(mood)
        for turn in range(3):
            assert ask(rig, f"turn-{turn}")[0] == words(PROMPT, 1, 6)
            flush(rig)
        store.set_mood("quick")


@pytest.mark.parametrize("backend", [PLAIN, IN_PLACE])
def test_damage_is_seen_by_the_trailer_alone(
    store: ObjectStore, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(value: bytes, *_: object) -> bytes:
        return value[:5] + bytes([value[5] ^ 4]) + value[6:]

    monkeypatch.setitem(MOODS, "damaging", Mood(damage=1.0))
    monkeypatch.setattr(object_store, "damaged", flip)
    rig = make_rig(hicache_ratio=4.0)
    try:
        attach(rig, store, backend)
        ask(rig, "writes")
        flush(rig)
        assert ask(rig, "reads") == (words(PROMPT, 1, 6), 28)
        flush(rig)
        store.set_mood("damaging")
        assert ask(rig, "damaged") == (words(PROMPT, 1, 6), 0)
        flush(rig)
        store.set_mood("quick")
        ask(rig, "writes again")
        flush(rig)
        store.set_mood("damaging")
        for module in (base, chaotic_store):
            monkeypatch.setattr(module, "is_intact", lambda *_, **__: True)
        with pytest.raises(WrongContext):
            ask(rig, "unchecked")
    finally:
        store.set_mood("quick")
        rig.close()


def test_a_call_hangs_until_it_is_released(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOODS, "hung", Mood(hang=1.0))
    store.set_mood("hung")
    ended = threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):
            store.begin("get")
        ended.set()

    threading.Thread(target=call, daemon=True).start()
    assert not ended.wait(0.05)
    store.release()
    assert ended.wait(30)


@pytest.mark.parametrize("backend", [IN_PLACE, FILE])
def test_objects_outlive_engines_and_not_a_restart(backend: str) -> None:
    with store_of(backend) as store:
        for turn, expected in (("writes", 0), ("reads", 28), ("after a restart", 0)):
            if turn == "after a restart":
                store.restart()
            with contextlib.closing(make_rig(hicache_ratio=4.0)) as rig:
                attach(rig, store, backend)
                assert ask(rig, turn)[1] == expected


def test_files_that_rot_are_found_damaged() -> None:
    rng = random.Random(1)
    with ObjectFolder(1) as store, contextlib.closing(make_rig(hicache_ratio=4.0)) as rig:
        attach(rig, store, FILE)
        ask(rig, "writes")
        for turn in range(3):
            flush(rig)
            for _ in range(3):
                store.rot(rng)
            assert ask(rig, f"reads {turn}")[0] == words(PROMPT, 1, 6)
        assert isinstance(rig.tree, HiRadixCache)
        assert counts(rig.tree.metrics.prefetch_outcomes)["damaged"]


@pytest.mark.usefixtures("patient")
def test_writes_that_wait_for_room_end_with_what_is_above_them(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that refuses is not asked again and again by an engine that has nothing to do."""
    monkeypatch.setitem(MOODS, "hung", Mood(hang=1.0))
    rig = make_rig(hicache_ratio=14 / 16)  # Writes under way have half of it: 7 pages.
    try:
        attach(rig, store, IN_PLACE, prefetch_threshold=1000)
        store.set_mood("hung")
        # The first write hangs, the second waits for room, the third prompt cuts it in two parts
        # that each fit, but not together.
        waits = [*range(100, 100 + 8 * PAGE)]
        for rid, ids in (("hangs", PROMPT[:8]), ("waits", waits), ("cuts", [*waits[:16], 7])):
            rig.step(rig.request(rid, ids, greedy(1), seed=1))
            deadline = time.monotonic() + 60
            while rid not in rig.results or "writes" in rig.tree.is_busy():
                assert time.monotonic() < deadline
                rig.step()
        assert rig.tree.is_busy()["backups"] > 1
        store.set_mood("full")
        store.release()
        settle(rig)
    finally:
        store.set_mood("quick")
        store.release()
        rig.close()


def attach_after_a_split(rig: CheckableRig, store: ObjectStore) -> HiRadixCache:
    """Attach L3 to a tree in L1 and L2 with a node of two pages, and two nodes below it."""
    for rid, ids in (("whole", PROMPT), ("splits", [*PROMPT[: 2 * PAGE], *range(50, 60)])):
        rig.step(rig.request(rid, ids, greedy(1), seed=1))
        settle(rig)
    attach(rig, store, IN_PLACE, prefetch_threshold=1000)
    assert isinstance(rig.tree, HiRadixCache)
    return rig.tree


@pytest.mark.usefixtures("patient")
def test_a_page_that_was_damaged_before_its_write_counts_as_written(store: ObjectStore) -> None:
    with contextlib.closing(make_rig(hicache_ratio=4.0)) as rig:
        cache = attach_after_a_split(rig, store)
        flip(pool_of(cache), host_pages(cache, PROMPT)[0])
        ask(rig, "writes")
        assert store.happened["damaged before its write"] == 1
        stored = map(cache.storage_backup.has_stored, cache.tree.walk(RadixKey(PROMPT)))
        assert list(stored) == [True, True]
        assert_stored(cache, store, IN_PLACE, epoch_began=0.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fault", ["none", "after a refused page", "before its parent"])
def test_a_page_that_is_written_before_its_parent_shows(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    refused: list[str] = []
    set_page = InPlaceStore._set_page

    def refuse_first(backend: InPlaceStore, call: Call, key: str, *args: Any) -> CacheOutcome:
        if not refused or key == refused[0]:
            refused.append(key)
            return CacheOutcome.FAILED
        return set_page(backend, call, key, *args)

    if fault == "before its parent":
        write_all = StorageBackup._write_all
        monkeypatch.setattr(StorageBackup, "_refusal", lambda *_: None)
        monkeypatch.setattr(
            StorageBackup, "_write_all", lambda flow, nodes: write_all(flow, nodes[::-1])
        )
    else:
        monkeypatch.setattr(InPlaceStore, "_set_page", refuse_first)
    if fault == "after a refused page":
        monkeypatch.setattr(StorageOperation, "lacks_predecessor", False)
    with contextlib.closing(make_rig(hicache_ratio=4.0)) as rig:
        cache = attach_after_a_split(rig, store)
        ask(rig, "writes")
        if fault == "none":
            assert refused
            assert_stored(cache, store, IN_PLACE, epoch_began=0.0)
        else:
            with pytest.raises(AssertionError, match="written before a page above it"):
                assert_stored(cache, store, IN_PLACE, epoch_began=0.0)


def test_what_befalls_a_call_follows_from_the_seed() -> None:
    def fates(seed: int) -> list[float]:
        with ObjectStore(seed) as store:
            return [store.begin("get").rng.random() for _ in range(5)]

    assert fates(3) == fates(3) != fates(4)


def test_the_worker_has_the_pools_of_its_sizes() -> None:
    worker = CheckableWorker(page_size=16, pool_tokens=64, max_requests=3)
    assert worker.token_to_kv_pool_allocator.available_size() == 64
    assert worker.req_to_token_pool.available_size() == 3

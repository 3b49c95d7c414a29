"""The scheduler without work: it checks itself in parts, between which it looks for messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.call_counts import CallCounts, uncounted
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.io_struct import SchedulerOutput, ShutdownReq, Tick, ToScheduler
from sglang.srt.utils.parts import Parts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PAGE = 4


def fill(rig: SchedulerRig, nodes: int, depth: int = 4) -> None:
    """Put prompts of `depth` pages into the tree, each page a node, and let lower tiers follow."""
    for number in range(nodes // depth):
        for pages in range(1, depth + 1):
            key = RadixKey([100 + number, *range(PAGE * pages - 1)])
            slots = rig.scheduler.state.pools.allocator.alloc(len(key))
            assert slots is not None
            known = rig.tree.insert(InsertParams(key=key, value=slots)).prefix_len
            rig.scheduler.state.pools.allocator.free(slots[:known])
    rig.settle(60.0)
    assert len(list(rig.tree.nodes())) == nodes // depth * depth


class Watch:
    """A channel for `Scheduler.run` that counts the parts of checks between two looks.

    Args:
        say: Messages of a look, by its timeout in milliseconds; None ends the server.
    """

    def __init__(self, rig: SchedulerRig, say: Callable[[int], list[ToScheduler] | None]) -> None:
        self._state, self._say = rig.scheduler.state, say
        self._parts, self.checks, self.ended = rig.scheduler.state.integrity_parts, 0, 0
        self.done = self.looks = 0
        self.most = 0
        """Most parts between two looks."""
        self._before = 0

    def integrity_parts(self) -> Parts:
        self.checks += 1
        self.done = self._before = 0
        for _ in self._parts():
            self.done += 1
            yield
        self.ended += 1

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        self.looks += 1
        self.most = max(self.most, self.done - self._before)
        self._before = self.done
        said = self._say(timeout_ms)
        return [ShutdownReq(timeout=5.0)] if said is None else said

    def send(self, output: SchedulerOutput) -> None:
        pass


def run_with(rig: SchedulerRig, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(rig.scheduler.state), "integrity_parts", lambda _: watch.integrity_parts()
    )
    rig.scheduler.run(watch)


def test_there_is_a_look_for_messages_after_each_part(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(model, pool_tokens=2000, page_size=PAGE)
    fill(rig, 200)
    watch = Watch(rig, lambda timeout_ms: None if rig.scheduler._is_verified else [])
    run_with(rig, watch, monkeypatch)
    assert (watch.checks, watch.ended, watch.most) == (1, 1, 1)
    assert watch.looks > 200 / 16


def test_messages_at_any_time_end_a_check_and_never_mislead_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request changes the tree between two parts. When messages end, a whole check is done."""
    rig = SchedulerRig(model, pool_tokens=400, page_size=PAGE)
    fill(rig, 80)
    turn = 0

    def say(timeout_ms: int) -> list[ToScheduler] | None:
        nonlocal turn
        if rig.scheduler._is_verified:
            return None
        # After 1 part of the first check, 2 of the second and so on.
        if rig.scheduler._check is None or watch.done < watch.checks or watch.checks > 12:
            return []
        turn += 1
        return [rig.request(f"r{turn}", prompt(turn, 20), greedy(3))]

    watch = Watch(rig, say)
    run_with(rig, watch, monkeypatch)
    assert watch.checks > watch.ended == 1
    assert turn == 12 and rig.scheduler.state.counters.finished == 12


@pytest.mark.parametrize("fault", ["a lost page", "another digest", "a lost mark"])
def test_a_check_in_parts_finds_what_a_whole_one_does(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    rig = SchedulerRig(model, pool_tokens=400, page_size=PAGE)
    fill(rig, 80)
    node = list(rig.tree.nodes())[-1]
    if fault == "a lost page":
        rig.scheduler.state.pools.allocator.alloc(PAGE)
    elif fault == "another digest":
        rig.tree.tree.root.tree_digest.value ^= 1
    else:
        node.kept_on_device += 1
    watch = Watch(rig, lambda timeout_ms: [])
    with pytest.raises(AssertionError):
        run_with(rig, watch, monkeypatch)
    with pytest.raises(AssertionError):
        rig.check()


def test_an_idle_tick_changes_nothing(model: Path) -> None:
    """An idle tick only checks, so ranks need not agree on the number of parts of the check."""
    rig = SchedulerRig(model, pool_tokens=400, page_size=PAGE)
    fill(rig, 80)
    ticks = rig.scheduler.state.counters.ticks
    assert rig.scheduler._step_or_verify(Tick(5e9, is_idle=True)) == []
    assert (rig.scheduler.state.counters.ticks, rig.scheduler.state.now < 5e9) == (ticks, True)


# ---- costs, as counts of calls -------------------------------------------------------------------


def most_calls_of_a_part(rig: SchedulerRig) -> tuple[int, int]:
    """Parts of a check, and the most calls that one makes."""
    parts, most, count = rig.scheduler.state.integrity_parts(), 0, 0
    while True:
        with CallCounts() as calls:
            is_over = next(parts, parts) is parts
        most, count = max(most, calls.total), count + 1
        if is_over:
            return count, most


def test_a_part_of_a_check_is_as_small_in_a_large_tree(model: Path) -> None:
    """One of 64 nodes or of 4,096 tokens at most."""
    settings: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    found = []
    for nodes in (200, 800):
        rig = SchedulerRig(model, pool_tokens=PAGE * (nodes + 16), page_size=PAGE, **settings)
        fill(rig, nodes)
        found.append(most_calls_of_a_part(rig))
        rig.close()
    (few, small), (many, large) = found
    assert many > 3 * few
    assert large <= small + 16 and large < 1500


def test_one_long_prompt_is_checked_in_parts_too(model: Path) -> None:
    rig = SchedulerRig(model, pool_tokens=1 << 17, page_size=PAGE)
    slots = rig.scheduler.state.pools.allocator.alloc(1 << 17)
    assert slots is not None
    rig.tree.insert(InsertParams(key=RadixKey(list(range(1 << 17))), value=slots))
    parts, most = most_calls_of_a_part(rig)
    assert parts > 2 * (1 << 17) / 4096 and most < 500


TIERS: dict[str, dict[str, Any]] = {
    "L1": {},
    "L2": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0},
    "L3": {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
    },
}


@pytest.fixture
def decoding(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[str, int], list[CallCounts]]]:
    """Calls of the decode ticks of two pages, with tiers down to a last one and a tree of so many
    nodes.

    Calls that depend on other things are left out: those of the forward, because attention on a
    CPU makes fewer where slots are neighbours; what happens at intervals; and copies, because no
    page of prompt or answer is in the tree yet.
    """
    rigs = []

    def count(last: str, nodes: int) -> list[CallCounts]:
        rig = SchedulerRig(model, pool_tokens=PAGE * (nodes + 32), page_size=PAGE, **TIERS[last])
        rigs.append(rig)
        fill(rig, nodes)
        rig.scheduler.state.pools.allocator.merge_and_sort_free()
        forward = uncounted(rig.worker.forward_batch_generation)
        monkeypatch.setattr(rig.worker, "forward_batch_generation", forward)
        rig.step(rig.request("r", prompt(1, PAGE - 1), greedy(10 * PAGE)))
        rig.now += 3600.0  # The tick after an hour does all that happens at intervals.
        rig.step()
        monkeypatch.setattr(rig, "tick_s", 0.001)
        found = []
        for _ in range(2 * PAGE):
            with CallCounts() as calls:
                rig.step()
            found.append(calls)
        assert rig.scheduler.state.queues.decoding and not rig.tree.is_busy()
        return found

    caplog.set_level(logging.WARNING, logger="sglang")  # The status line has a clock of its own.
    yield count
    for rig in rigs:
        rig.close()


def test_a_decode_tick_does_not_grow_with_the_tree(
    decoding: Callable[[str, int], list[CallCounts]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "l3"))
    small = {last: decoding(last, 8) for last in TIERS}
    assert small == {last: decoding(last, 80) for last in TIERS}
    assert small["L3"] == small["L2"]
    for with_tiers, alone in zip(small["L2"], small["L1"], strict=True):
        assert with_tiers.python <= alone.python + 8 and with_tiers.c <= alone.c + 7

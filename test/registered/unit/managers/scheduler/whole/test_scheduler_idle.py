"""The scheduler without work: it checks itself in parts, between which it looks for messages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.call_counts import CallCounts
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.managers.messages.io_struct import ShutdownReq, Tick, ToScheduler
from sglang.srt.managers.scheduler.scheduler import SchedulerOutput
from sglang.srt.mem_cache.tree.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
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
    rig.settle()
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
    """It is for the check alone, so that ranks need not agree on the number of its parts."""
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


@pytest.fixture
def decoding(model: Path, tmp_path: Path) -> Iterator[Callable[[int, bool], CallCounts]]:
    """Calls of a decode tick, with a tree of so many nodes, with an L3 or without."""
    rigs = []

    def count(nodes: int, has_store: bool) -> CallCounts:
        # On a loaded machine an answer may end before its prompt's copies have landed.
        found = (usual_calls(nodes, has_store) for _ in range(20))
        return next(calls for calls in found if calls is not None)

    def usual_calls(nodes: int, has_store: bool) -> CallCounts | None:
        settings: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
        if has_store:
            settings["hicache_storage_backend"] = "file"
        rig = SchedulerRig(model, pool_tokens=PAGE * (nodes + 32), page_size=PAGE, **settings)
        rigs.append(rig)
        fill(rig, nodes)
        rig.step(rig.request("r", prompt(1, 5), greedy(40)))
        while rig.scheduler.state.counters.decode_steps < 5 or rig.tree.is_busy():
            rig.wait_a_tick()
        # The usual tick: one in four takes a page, and one may write the status line.
        counts = []
        for _ in range(6):
            with CallCounts() as calls:
                rig.step()
            counts.append(calls)
        has_ended = not rig.scheduler.state.queues.decoding
        pairs = [(one.python, one.c) for one in counts]
        return None if has_ended else counts[pairs.index(statistics.mode(pairs))]

    torch.set_num_threads(1)
    yield count
    for rig in rigs:
        rig.close()


def test_a_decode_tick_does_not_grow_with_the_tree(
    decoding: Callable[[int, bool], CallCounts], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "l3"))
    plain, large = decoding(20, False), decoding(400, False)
    stored, both = decoding(20, True), decoding(400, True)
    # Ticks differ by some calls, as copies of the answer's pages land. 380 nodes more would add
    # some hundred, if a tick looked at each.
    assert abs(large.total - plain.total) < 150 and abs(both.total - stored.total) < 150
    assert stored.total <= plain.total + 150


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

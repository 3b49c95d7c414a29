"""Copies through a buffer: their steps, and the order of their streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rigs.caches.plain_copies import LAYERS, ROW, parts_of
from rigs.stores.host_pools import PAGE, make_device_pool, make_host_pool
from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.hardware_backend.device_runtime import Event, SideStream
from sglang.srt.mem_cache.host import staged_copy
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import HostRows, PartRows
from sglang.srt.mem_cache.host.staged_copy import (
    Chunk,
    LoadTuning,
    PartGroups,
    StagedBackup,
    StagedLoad,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

MB = 10**6


def test_a_step_is_worth_a_millisecond_and_a_half() -> None:
    tuning = LoadTuning()
    sizes = [0, 1, 62 * MB, 80 * MB, 80 * MB + 1, 127 * MB, 160 * MB, 160 * MB + 1]
    assert [tuning.steps_of_short(size) for size in sizes] == [1, 1, 1, 1, 2, 2, 2, None]


def test_a_long_load_takes_as_few_layers_at_once_as_make_long_runs() -> None:
    device = make_device_pool()

    def at_once(layout: str, run_bytes: int) -> int:
        part = parts_of(make_host_pool(device, layout), device)[0]
        return LoadTuning(run_bytes=run_bytes).layers_at_once(part, PAGE)

    layer = PAGE * ROW
    assert [at_once("page_first_direct", n * layer) for n in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert at_once("layer_first", layer + 1) == 2
    assert at_once("page_first", 1) == LAYERS


def made(
    monkeypatch: pytest.MonkeyPatch, row_bytes: int, page_size: int, layers: int
) -> tuple[PartGroups, int, torch.device, CopyEngine]:
    """Arguments of copies of one part, with a buffer of 128 MiB. No kernel is compiled."""
    pytest.importorskip("triton")
    from sglang.srt.mem_cache.host.token_copy import TokenCopy

    monkeypatch.setattr(TokenCopy, "compile", lambda _: None)
    monkeypatch.setattr(CpuRuntime, "memory", lambda _: (0, 141 << 30))
    layer = row_bytes * page_size
    rows = HostRows(row_bytes, page_size, layer * layers, row_bytes, layer, 16)
    if page_size == 1:
        rows = HostRows(row_bytes, 1, layer * layers, layer * layers, layer, 16)
    part = PartRows(rows, 0, tuple(range(0, 16 * layers, 16)), row_bytes)
    table = torch.zeros(1, layers, dtype=torch.int64)
    engine = CopyEngine.__new__(CopyEngine)
    return [([part], table)], page_size, torch.device("cpu"), engine


def staged(
    monkeypatch: pytest.MonkeyPatch, row_bytes: int, page_size: int, layers: int
) -> StagedLoad:
    return StagedLoad(*made(monkeypatch, row_bytes, page_size, layers), LoadTuning())


LONG = 1000 * MB


def test_steps_follow_from_the_bytes_of_the_whole_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 layers of 128 KiB keys a page: 29 pages of them fit the buffer."""
    keys = staged(monkeypatch, 2 * KIB, 64, 36)
    halves, long = [0, 18], [0, *range(1, 36, 4), 35]
    for pages, load_bytes, starts in (
        (16, 16 * 36 * 128 * KIB, [0]),
        (28, 28 * 36 * 128 * KIB, halves),
        (1, 100 * MB, halves),
        (16, LONG, long),
        (29, 80 * MB, long),
    ):
        found = keys.steps(pages, load_bytes)
        assert [step.start for step in found] == starts, (pages, load_bytes)
        assert [layer for step in found for layer in step] == list(range(36))


def test_a_state_comes_at_once_even_in_a_long_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """23 layers of 2 MiB; then 40, which are more than a step."""
    state = staged(monkeypatch, 2 * MIB, 1, 23)
    assert [step.start for step in state.steps(1, 62 * MB)] == [0]
    assert [step.start for step in state.steps(1, LONG)] == [0]
    assert [step.start for step in state.steps(2, 2 * 49 * MB)] == [0, 12]
    assert [step.start for step in state.steps(3, 3 * 49 * MB)] == [0, 1, 9, 17, 22], "no room"
    longer = staged(monkeypatch, 2 * MIB, 1, 40)
    assert [step.start for step in longer.steps(1, 127 * MB)] == [0, 20]
    assert [step.start for step in longer.steps(1, LONG)] == [0, 1, 9, 17, 25, 33, 39]


class LoggedStream(SideStream):
    """Writes what it is asked to do."""

    def __init__(self, log: list[str], name: str, handle: int) -> None:
        self._log = log
        self.name = name
        self._handle = handle

    @property
    def handle(self) -> int:
        return self._handle

    def follow(self, other: SideStream | None = None) -> None:
        assert isinstance(other, LoggedStream)
        self._log.append(f"{self.name} follows {other.name}")

    def wait(self, event: Event) -> None:
        assert isinstance(event, LoggedEvent)
        self._log.append(f"{self.name} waits for {event.name}")

    def record(self, event: Event) -> None:
        assert isinstance(event, LoggedEvent)
        self._log.append(f"{self.name} records {event.name}")


class LoggedEvent:
    def __init__(self, name: str) -> None:
        self.name = name

    def query(self) -> bool:
        raise AssertionError

    record = synchronize = wait = query


@pytest.fixture(name="log")
def log_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of work in two streams, `here` (1) and `side` (2), with buffers A and B."""
    log: list[str] = []
    names = iter("AB" * 9)
    streams = {1: "here", 2: "side"}
    monkeypatch.setattr(CpuRuntime, "make_event", lambda _: LoggedEvent(next(names)))
    monkeypatch.setattr(CpuRuntime, "here", lambda _: LoggedStream(log, "here", 1))
    monkeypatch.setattr(
        CpuRuntime, "make_side_stream", lambda *_, **__: LoggedStream(log, "side", 2)
    )

    def engine(_: object, buffer: int, chunk: Chunk, layers: range, stream: int) -> None:
        log.append(f"{streams[stream]} copies {chunk.pages.tolist()} {list(layers)}")

    def kernels(_: object, buffer: int, chunk: Chunk, layers: range) -> None:
        log.append(f"here spreads {chunk.pages.tolist()} {list(layers)}")

    monkeypatch.setattr(staged_copy._Plan, "fill", engine)
    monkeypatch.setattr(staged_copy._Plan, "empty_to_host", engine)
    monkeypatch.setattr(staged_copy._Plan, "run_kernels", kernels)
    return log


def test_a_short_load_takes_one_stream(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    load = staged(monkeypatch, 2 * MIB, 1, 2)
    pages = load.start(np.array([5]), torch.zeros(1, dtype=torch.int64), load.steps(1, 90 * MB))
    for layer in (0, 1):
        pages.load(range(layer, layer + 1))
    assert log == [
        "here waits for B", "here copies [5] [0]", "here spreads [5] [0]", "here records B",
        "here waits for A", "here copies [5] [1]", "here spreads [5] [1]", "here records A",
    ]  # fmt: skip


def test_pieces_of_a_long_load_are_copied_beside_the_kernel(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Two states of 64 MiB fill a buffer."""
    load = staged(monkeypatch, 16 * MIB, 1, 4)
    steps = load.steps(3, LONG)
    assert steps[0] == range(1)
    pages = load.start(np.array([5, 6, 7]), torch.zeros(3, dtype=torch.int64), steps)
    pages.load(steps[0])
    assert log == [
        "side follows here",
        "side waits for B", "side copies [5, 6, 7] [0]",
        "here follows side", "here spreads [5, 6, 7] [0]", "here records B",
    ]  # fmt: skip


def test_a_backup_in_pieces_fills_a_buffer_while_the_other_one_empties(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    copies = StagedBackup(*made(monkeypatch, 16 * MIB, 1, 4))
    copies.backup(np.array([5]), torch.zeros(1, dtype=torch.int64))
    alone = ["here waits for B", "here spreads [5] L", "here copies [5] L", "here records B"]
    assert log == [line.replace("L", "[0, 1, 2, 3]") for line in alone]
    log.clear()
    copies.backup(np.array([5, 6, 7]), torch.zeros(3, dtype=torch.int64))
    wanted = [
        "here waits for A", "here spreads [5, 6] L", "side follows here",
        "side copies [5, 6] L", "side records A",
        "here waits for B", "here spreads [7] L", "side follows here",
        "side copies [7] L", "side records B",
        "here follows side",
    ]  # fmt: skip
    assert log == [line.replace("L", "[0, 1, 2, 3]") for line in wanted]

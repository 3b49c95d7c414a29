"""Steps of loads through a buffer: few for what is soon on the device, short ones for the rest."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.plain_copies import LAYERS, ROW, parts_of
from rigs.stores.host_pools import PAGE, make_device_pool, make_host_pool
from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import HostRows, PartRows
from sglang.srt.mem_cache.host.staged_copy import LoadTuning, StagedLoad
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


def staged(
    monkeypatch: pytest.MonkeyPatch, row_bytes: int, page_size: int, layers: int
) -> StagedLoad:
    """Loads of one part with a buffer of 128 MiB; nothing is copied."""
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
    device = torch.device("cpu")
    return StagedLoad([([part], table)], page_size, device, engine, LoadTuning())


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

"""Prefills of 8,192 tokens and decode steps through ModelRunner, against the limits.

Weights are random. Two families get 32,768 tokens. Decode steps run with graphs and without. The
limit of a step of one request is reading its active weights once, and what DeepSeek-V4 has cached,
at the speed of a large copy in the same run (target: at most 1.5, of some families up to 1.8
times the limit). The run with graphs also replays one step (`replayed`), prefills 64 tokens after
8,192, and lists the kernels of the step and of prefills of 64 and 8,192 tokens by time. Kernels
that start early overlap, so the cost of a kernel is its end less the latest end before it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from unittest import mock

import torch

from benchmark.command import Command
from benchmark.gpu_hybrid.families import (
    EXPERTS,
    SHAPES,
    STEPS,
    add_families,
    length_of,
    model_of,
    page_of,
    prompt,
)
from benchmark.gpu_timing import device_ms
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver
from sglang.benchmark.one_batch import measure_limits
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.layer_weight import SCALES
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.mem_cache.device.state_spec import PoolName

SHORT: Final = 64
_PROFILED: Final = 4
"""Runs of a profile."""
_PART: Final = 64
_PARTS: Final = 8
"""Replayed steps that are timed together; parts of which the first and the last are reported."""
TARGET: Final = "at most 1.5"
TARGETS: Final = dict.fromkeys(("kimi_linear", "nemotron_h"), "at most 1.7") | {
    "deepseek_v4": "at most 1.8",
    "glm5_next": "at most 1.8",
}
"""Families with another target for decode steps than TARGET."""
PREFILL_TARGETS: Final = dict.fromkeys(TARGETS, "at most 2.5") | {"gpt_oss": "at most 2.0"}
EXPECTED_MS: Final = {"qwen3_next": 0.8, "deepseek_v4": 1.58}
NOT_READ: Final = ("embed", "tid2eid")
"""Parts of the names of tensors of which a token reads one row."""


def active_bytes(
    driver: StepDriver, shape: dict[str, Any], of_experts: float | None = None
) -> float:
    """Bytes of the weights that a step reads.

    Args:
        of_experts: Share of the experts; None: that of a step of one token.
    """
    return sum(slot.dest.nbytes * share for slot, share in _active(driver, shape, (), of_experts))


def active_operations(driver: StepDriver, shape: dict[str, Any]) -> float:
    """Operations of a token's products but for the head, in units of the time of one in 16 bits:
    two for each weight. Weights of one byte take half of the time, those of 4 bits do not."""
    total = 0.0
    for slot, share in _active(driver, shape, ("lm_head", SCALES), head="head.weight"):
        is_packed = slot.dest.dtype == torch.uint8
        total += slot.dest.nbytes * share * (4 if is_packed else 1)
    return total


def _active(
    driver: StepDriver,
    shape: dict[str, Any],
    but: tuple[str, ...],
    of_experts: float | None = None,
    head: str | None = None,
) -> Iterator[tuple[WeightSlot, float]]:
    """The slots without those whose names have parts in `but` or are `head`, and the share of each
    that a step reads, which is a token's share or `of_experts`."""
    if of_experts is None:
        experts = next(shape[name] for name in EXPERTS if name in shape)
        of_experts = shape["num_experts_per_tok"] / experts
    for name, slot in driver.runner.model.weight_slots():
        if name != head and not any(part in name for part in (*NOT_READ, *but)):
            yield slot, of_experts if ".experts." in name else 1.0


def add_decode(
    report: Report, case: dict[str, Any], step_ms: float, least_ms: float, expected: float | None
) -> None:
    report.add("decode", step_ms, "ms", case, expected=expected, limit=least_ms)
    target = TARGETS.get(case["family"], TARGET)
    report.add("times_the_limit", step_ms / least_ms, "ratio", case, target=target)


def costs_by_ends(spans: Iterable[tuple[int, int, str]]) -> dict[str, list[int]]:
    """Nanoseconds that each launch of a kernel adds to a timeline, by name.

    Args:
        spans: Begin, end and name of each kernel; times in nanoseconds.
    """
    costs: defaultdict[str, list[int]] = defaultdict(list)
    latest: int | None = None
    for begun, ended, name in sorted(spans):
        since = begun if latest is None else latest
        costs[name].append(max(0, ended - since))
        latest = max(ended, since)
    return costs


def add_kernels(report: Report, case: dict[str, Any], run: Callable[[], object]) -> None:
    """The kernels of a run, most time first: microseconds and launches of one run."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            run()
        torch.cuda.synchronize()
    assert profile.profiler is not None, "it has run"
    costs = costs_by_ends(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[:70])
        for event in profile.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    for name, added in sorted(costs.items(), key=lambda cost: -sum(cost[1]))[:24]:
        of_kernel = {**case, "kernel": name}
        us = sum(added) / 1e3 / _PROFILED
        report.add("time", us, "us", of_kernel, launches=len(added) / _PROFILED)


def kept_batches(driver: StepDriver, *steps: Callable[[], object]) -> list[ForwardBatch]:
    """The batches of some steps, which can run again."""
    forward = driver.runner.forward
    batches: list[ForwardBatch] = []

    def keep(batch: ForwardBatch) -> object:
        batches.append(batch)
        return forward(batch)

    with mock.patch.object(driver.runner, "forward", keep):
        for step in steps:
            step()
    return batches


def cache_bytes(driver: StepDriver, shape: dict[str, Any], length: int) -> float:
    """Bytes of what a token after `length` others reads of DeepSeek-V4's caches: windows, rows (the
    chosen ones of sparse layers) and the indexer's keys. 0 for other families."""
    pools, total = driver.runner.pools, 0.0
    if PoolName.C128 not in pools:
        return total
    for name in (PoolName.KV, PoolName.C128, PoolName.INDEXER, PoolName.SWA):
        spec = pools[name].spec
        items = 1 if name is PoolName.SWA else length // spec.stride
        if name is PoolName.KV:
            items = min(items, shape["index_topk"])
        total += items * spec.num_bytes
    return total


def measure_replays(
    case: dict[str, Any], driver: StepDriver, least_ms: float, expected: float | None,
    report: Report,
) -> None:  # fmt: skip
    """One decode step again and again, and a short prefill: the device's time, not the driver's.
    Steps are slower right behind a long prefill, which has taken the chip's power."""
    forward, length = driver.runner.forward, length_of(case["family"])
    step, short, long = kept_batches(
        driver,
        lambda: driver.decode([(0, 7)]),
        lambda: driver.extend([(1, prompt(5, SHORT))]),
        lambda: driver.extend([(2, prompt(2, length))]),
    )
    replayed = {**case, "replayed": True}
    behind_ms, *_, settled_ms = (device_ms(lambda: forward(step), _PART) for _ in range(_PARTS))
    add_decode(report, {**replayed, "behind": "a prefill"}, behind_ms, least_ms, None)
    add_decode(report, replayed, settled_ms, least_ms, expected)
    begun = time.perf_counter()
    forward(short)
    launched_ms = (time.perf_counter() - begun) * 1e3
    report.add("prefill_64", device_ms(lambda: forward(short), 8), "ms", replayed)
    report.add("prefill_64_launch", launched_ms, "ms", replayed)
    add_kernels(report, {**case, "of": "a decode step"}, lambda: forward(step))
    add_kernels(report, {**case, "of": "64 tokens"}, lambda: forward(short))
    add_kernels(report, {**case, "of": f"{length} tokens"}, lambda: forward(long))


def measure_steps(
    family: str, model: str, weights: str, attention_backend: str | None, report: Report
) -> None:
    shape, length = SHAPES[family][2], length_of(family)
    for disable_graphs in (False, True):
        driver = StepDriver(
            model,
            page_size=page_of(family),
            pool_tokens=3 * length + 1024,
            max_requests=8,
            device="cuda",
            load_format="dummy",
            disable_cuda_graph=disable_graphs,
            cuda_graph_max_bs=2,
            attention_backend=attention_backend,
        )
        wait = device_runtime("cuda").synchronize
        seconds = []
        for row in range(2):
            wait()
            begun = time.perf_counter()
            driver.extend([(row, prompt(row, length))])
            wait()
            seconds.append(time.perf_counter() - begun)
        for nth in range(STEPS + 4):
            if nth == 4:
                wait()
                begun = time.perf_counter()
            driver.decode([(0, 7)])
        wait()
        step_ms = (time.perf_counter() - begun) / STEPS * 1e3
        limits = measure_limits("cuda", torch.bfloat16)
        # A copy reads and writes: half of its bytes would be a lower limit than reading reaches.
        read = active_bytes(driver, shape) + cache_bytes(driver, shape, length)
        least_ms = read / limits.copy_bytes_per_s * 1e3
        # Attention is left out.
        least_s = active_operations(driver, shape) * length / limits.product_flop_per_s
        case = {"family": family, "weights": weights, "graphs": len(driver.runner._graphs)}
        report.add(f"prefill_{length}", seconds[1], "s", case, limit=least_s)
        report.add("prefill_times_the_limit", seconds[1] / least_s, "ratio", case,
                   target=PREFILL_TARGETS.get(family))  # fmt: skip
        report.add("active_weights", active_bytes(driver, shape) / 1e9, "GB", case)
        expected = EXPECTED_MS.get(family) if weights == "bf16" else None
        add_decode(report, case, step_ms, least_ms, expected)
        if not disable_graphs:
            measure_replays(case, driver, least_ms, expected, report)
        del driver
        torch.cuda.empty_cache()


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family, weights=args.weights) as model:
            measure_steps(family, model, args.weights, args.attention_backend, report)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_families(parser)
    parser.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="format")
    parser.add_argument("--attention-backend")


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",))

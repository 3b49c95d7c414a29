"""A decode step on one and on two GPUs, kernel by kernel, inside its graph.

For each number of ranks and each batch: figures of the step, and of each kernel how often it runs,
how long, and how long the device has nothing to run before it. torch.profiler's times, Qwen3-8B's
shape. A kernel with a barrier includes the wait for the other rank. `--device cpu` tries it with a
small model and operations in place of kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict

import torch

from benchmark.command import Command
from benchmark.gpu_model import POOL_TOKENS, GpuModel
from benchmark.gpu_ranks.scale import TINY_MODEL
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import get_attention_tp_group, get_world_group

BATCHES: Final = ((1, 1024), (64, 2048))
"""Requests and context."""
STEPS: Final = 12
MOST_KERNELS: Final = 24
LONGEST_GAP_US: Final = 60.0
"""Longest gap inside a step, in microseconds; longer ones are the CPU's, between steps."""
_NAME_CHARS: Final = 110
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU: Final = ("cpu_op",)

Event = Mapping[str, Any]


class KernelSum(TypedDict):
    """Sums over the launches of one kernel, for each step."""

    name: str
    count: float
    us: float
    gap_us: float
    """Microseconds in which the device has nothing to run before it."""


def kernel_sums(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Sums over the device's work, for each step.

    Args:
        events: Events of a Chrome trace, `ts` and `dur` in microseconds.
        steps: Number of steps that they are of.

    Returns:
        `busy_us`, `gaps_us` and `between_steps_us` of a step, how many `launches` it has, and
        `kernels`: name, and for each step `count`, `us` and `gap_us` before, the longest first.
    """
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    between, end = 0.0, None
    for event in ordered:
        begin, length = float(event["ts"]), float(event["dur"])
        gap = 0.0 if end is None else max(0.0, begin - end)
        if gap > LONGEST_GAP_US:
            between, gap = between + gap, 0.0
        of_name = sums[str(event["name"])[:_NAME_CHARS]]
        for index, value in enumerate((1.0, length, gap)):
            of_name[index] += value / steps
        end = begin + length if end is None else max(end, begin + length)
    kernels: list[KernelSum] = [
        {"name": name, "count": round(count, 2), "us": round(us, 2), "gap_us": round(gap, 2)}
        for name, (count, us, gap) in sums.items()
    ]
    kernels.sort(key=lambda one: -one["us"] - one["gap_us"])
    return {
        "launches": round(sum(count for count, _, _ in sums.values()), 2),
        "busy_us": round(sum(us for _, us, _ in sums.values()), 1),
        "gaps_us": round(sum(gap for _, _, gap in sums.values()), 1),
        "between_steps_us": round(between / steps, 1),
        "kernels": kernels,
    }


def profiled(work: Callable[[], object]) -> list[Event]:
    """What `work` runs: kernels and copies of a GPU, or operations where there is none."""
    activity = torch.profiler.ProfilerActivity
    on_device = torch.cuda.is_available()
    activities = [activity.CUDA] if on_device else [activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if on_device:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = _ON_DEVICE if on_device else _ON_CPU
    return [event for event in events if event.get("cat") in kinds and "dur" in event]


def profile_on_gpu() -> dict[str, dict[str, Any]]:
    """One rank's part."""
    rank = get_world_group().rank
    model = GpuModel(64, POOL_TOKENS, gpu_id=rank, tp_group=get_attention_tp_group())
    found = {}
    for count, context in BATCHES:
        model.lay_out(count, context + 64)
        ms, _ = model.decode_steps(count, context, 32)
        events = profiled(partial(model.decode_steps, count, context, STEPS))
        # `decode_steps` makes three steps before those that it is asked for.
        found[f"{count} x {context}"] = {"step_ms": ms, **kernel_sums(events, STEPS + 3)}
    return found


def profile_tiny(model: str) -> dict[str, dict[str, Any]]:
    """One rank's part on a CPU: operations in place of kernels."""
    driver = StepDriver(model, tp_group=get_attention_tp_group())
    driver.extend([(row, [5, 6, 7]) for row in range(4)])

    def decode() -> None:
        for _ in range(STEPS):
            driver.decode([(row, 9) for row in range(4)])

    return {"4 x 3": kernel_sums(profiled(decode), STEPS)}


def run(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as model:
        if args.device == "cpu":
            save_tiny_checkpoint(model, "qwen3", **TINY_MODEL)
        for ranks in (1, 2):
            if args.device == "cuda":
                results = run_ranks(ranks, profile_on_gpu, device="cuda")
            else:
                results = run_ranks(ranks, profile_tiny, model)
            for rank, batches in enumerate(results):
                for batch, found in batches.items():
                    add_step(report, {"ranks": ranks, "rank": rank, "batch": batch}, found)


def add_step(report: Report, case: dict[str, Any], found: dict[str, Any]) -> None:
    report.add_all("ms", {"step": found.get("step_ms")}, case)
    report.add("launches", found["launches"], "count", case)
    times = {name: found[f"{name}_us"] for name in ("busy", "gaps", "between_steps")}
    report.add_all("us", times, case)
    # The events of the first rank stand for both ranks.
    for kernel in found["kernels"][: MOST_KERNELS if case["rank"] == 0 else 0]:
        of_kernel = {**case, "kernel": kernel["name"]}
        figures = {"time": kernel["us"], "gap_before": kernel["gap_us"]}
        report.add_all("us", figures, of_kernel, launches=kernel["count"])


COMMAND: Final = Command(run=run, devices=("cuda", "cpu"), gpus=2, quick={"device": "cpu"})

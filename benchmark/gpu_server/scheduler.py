"""CPU time of a decode step with up to 256 running requests, in this process, without HTTP.

Qwen3-8B's shape with dummy weights, random prompts, with overlap and without. Target: 1.5 ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any, Final

from benchmark.command import Command
from benchmark.gpu_server.requests import greedy_requests
from benchmark.report import Report
from rigs.models.qwen3_8b import dummy_model
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.scheduler.launched_step import StepResult
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.messages.io_struct import Tick
from sglang.srt.process.build import build_scheduler
from sglang.srt.server_args import ServerArgs

NEW_TOKENS: Final = 128
EXPECTED_MS: Final = {(1, 1024): 4.4, (64, 256): 5.95, (256, 256): 10.8}
"""Requests and context, to the expected time of a step with overlap."""


class Waiting:
    """Seconds that the CPU spent waiting for steps to end; wraps `StepResult.wait`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = StepResult.wait

        def timed(result: StepResult) -> None:
            begun = time.perf_counter()
            wait(result)
            self.seconds += time.perf_counter() - begun

        StepResult.wait = timed  # type: ignore[method-assign, assignment]


def measure_steps(scheduler: Scheduler, waiting: Waiting, count: int, context: int) -> list[Any]:
    """(whole, waiting) seconds of the ticks in which `count` requests decode."""
    requests = greedy_requests(str(count), count, context, NEW_TOKENS)
    scheduler.step(Tick(time.monotonic(), requests))
    times = []
    while not scheduler.is_idle():
        before = scheduler.state.counters.decode_steps
        begun, waited = time.perf_counter(), waiting.seconds
        scheduler.step(Tick(time.monotonic(), []))
        seconds = time.perf_counter() - begun
        is_decode = scheduler.state.counters.decode_steps > before
        if is_decode and len(scheduler.state.queues.decoding) == count:
            times.append((seconds, waiting.seconds - waited))
    return times


def measure(model: str, report: Report) -> None:
    args = ServerArgs.from_kwargs(
        model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
        device="cuda", page_size=64, max_total_tokens=131072,
    )  # fmt: skip
    begun = time.monotonic()
    built = build_scheduler(args.resolve())
    report.add("build", time.monotonic() - begun, "s")
    resources = built.scheduler._resources
    waiting = Waiting()
    for (count, context), expected in EXPECTED_MS.items():
        for overlap in (False, True):
            overlapped = dataclasses.replace(resources, overlap=overlap)
            scheduler = Scheduler(built.server_args, overlapped)
            times = measure_steps(scheduler, waiting, count, context)
            whole, waited = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
            case = {"requests": count, "context": context, "overlap": overlap}
            report.add("cpu", whole - waited, "ms", case, target="at most 1.5")
            report.add("step", whole, "ms", case, expected=expected if overlap else None)
            report.add("steps", len(times), "count", case)
    built.scheduler.close()


def run(args: argparse.Namespace, report: Report) -> None:
    with dummy_model() as directory:
        measure(directory, report)


COMMAND: Final = Command(run=run, devices=("cuda",))

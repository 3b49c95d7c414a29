"""Clocks of a GPU's work, and the limits that it is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmark.report import Report
from sglang.benchmark.one_batch import Limits, measure_limits
from sglang.srt.model_executor.graph_capture import GraphCapture

_PER_GRAPH: Final = 64
_REPLAYS: Final = 9


def add_limits(report: Report) -> Limits:
    """Measure and report the rates of a large copy and of a large product in bf16."""
    limits = measure_limits("cuda", torch.bfloat16)
    report.add("large_copy", limits.copy_bytes_per_s / 1e12, "TB/s")
    report.add("large_product", limits.product_flop_per_s / 1e12, "TFLOP/s")
    return limits


def median_ms(work: Callable[[], object], rep: int = 60) -> float:
    """Median milliseconds of `work` on the GPU, with flushed caches, in about `rep` ms."""
    from triton.testing import do_bench  # On GPU hosts alone.

    return float(do_bench(work, warmup=15, rep=rep, return_mode="median"))


def device_ms(run: Callable[[], object], times: int) -> float:
    """Milliseconds of the device for each of `times` runs, queued one after the other."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    begun.record()
    for _ in range(times):
        run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / times


def graph_us(run: Callable[[], object]) -> float:
    """Median microseconds of one `run`, of many in a CUDA graph."""

    def many() -> None:
        for _ in range(_PER_GRAPH):
            run()

    with torch.inference_mode():
        graph, _ = GraphCapture().capture(many)
        seconds = []
        for _ in range(_REPLAYS + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:]) / _PER_GRAPH * 1e6

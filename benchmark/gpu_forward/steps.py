"""Prefills and decode steps through ModelRunner, against the limits.

Weights are dummies (`--load-format dummy`), prompts and contexts random. Each figure is printed
with its share of the limits, measured in the same run: the rate of a large matrix product and the
speed of a large copy. Decoding is greedy.

A prompt is measured back to back, where the chip's power limits its clock, and rested, after a
second without work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmark.command import Command
from benchmark.gpu_model import POOL_TOKENS, GpuModel
from benchmark.gpu_timing import add_limits
from benchmark.report import Report
from rigs.models.qwen3_8b import WEIGHTS
from sglang.benchmark.one_batch import Limits, StepWork, decode_work, least_seconds
from sglang.srt.hardware_backend.device_runtime import device_runtime

REST_S: Final = 1.0
PREFILLS: Final = (
    (0, 8192), (0, 32768), (24576, 8192), (8192, 64), (32000, 64), (0, 512), (0, 7777),
    (1500, 6000),
)  # fmt: skip
"""Tokens of a prefix and behind it."""
EXPECTED_S: Final = {(0, 8192): 0.20, (0, 32768): 1.25, (24576, 8192): 0.39, (8192, 64): 0.010}
DECODES_MS: Final = {(1, 1024): 4.88, (64, 2048): 10.0, (256, 256): 11.5}
"""Requests and context, to the target of a step in bf16."""


def profiled(name: str, work: Callable[[], object], directory: Path | None) -> None:
    """Write a profile of the GPU's time to a file."""
    if directory is None:
        return
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        work()
        torch.cuda.synchronize()
    table = profile.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60
    )
    (directory / f"{name}.txt").write_text(table, encoding="utf-8")


def measure_prefill(
    model: GpuModel, prefix: int, new: int, limits: Limits, report: Report,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    model.lay_out(1, prefix + new)
    batch = model.extend(prefix, new)
    seconds = [model.seconds(batch) for _ in range(4)]
    rested = []
    for _ in range(3 if not prefix and new >= 8192 else 0):
        time.sleep(REST_S)
        rested.append(model.seconds(batch))
    work = StepWork(
        new_tokens=new, pairs=new * prefix + new * (new + 1) / 2, last_pairs=prefix + new,
        read_kv_bytes=int(prefix * model.runner.kv_bytes_per_token()), logits=1,
    )  # fmt: skip
    least = least_seconds(model.runner.model_config, work, limits)
    median = sorted(seconds[1:])[1]
    case = {"prefill": new, "after": prefix}
    expected = EXPECTED_S.get((prefix, new)) if args.weights == "bf16" else None
    report.add("first", seconds[0], "s", case)
    report.add("step", median, "s", case, expected=expected, limit=least)
    if rested:
        report.add("rested", sorted(rested)[1], "s", case)
    report.add("of_limit", least / median, "ratio", case)
    profiled(f"prefill_{new}_after_{prefix}", partial(model.runner.forward, batch), args.profile)


def measure_decode(
    model: GpuModel, count: int, context: int, limits: Limits, report: Report,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    model.lay_out(count, context + args.steps)
    step_ms, cpu_ms = model.decode_steps(count, context, args.steps)
    kv_bytes = model.runner.kv_bytes_per_token()
    work = decode_work(count, context + args.steps // 2, kv_bytes)
    least = least_seconds(model.runner.model_config, work, limits) * 1e3
    case = {"decode": count, "context": context}
    target = f"at most {DECODES_MS[count, context]:g}" if args.weights == "bf16" else None
    report.add("step", step_ms, "ms", case, target=target, limit=least)
    report.add("cpu", cpu_ms, "ms", case)
    report.add("of_limit", least / step_ms, "ratio", case)
    report.add("throughput", count / step_ms * 1e3, "token/s", case)
    steps = partial(model.decode_steps, count, context, 4)
    profiled(f"decode_{count}_x_{context}", steps, args.profile)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="format of weights")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--profile", type=Path, help="directory for profiles")


def run(args: argparse.Namespace, report: Report) -> None:
    limits = add_limits(report)
    model = GpuModel(
        args.page_size,
        POOL_TOKENS,
        args.weights,
        disable_cuda_graph=args.disable_cuda_graph,
        kv_cache_dtype=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
    )
    free, total = device_runtime("cuda").memory()
    report.add_all("s", {"load": model.load_s, "pools_and_graphs": model.init_s})
    report.add_all("GiB", {"free": free / 2**30, "total": total / 2**30})
    for prefix, new in PREFILLS:
        measure_prefill(model, prefix, new, limits, report, args)
    for count, context in DECODES_MS:
        measure_decode(model, count, context, limits, report, args)


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",), quick={"steps": 8})

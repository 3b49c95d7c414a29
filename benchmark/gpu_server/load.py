"""The scheduler's time for a hit from L2: how long its thread issues a load, and the first token.

Qwen3-8B's shape with dummy weights, in this process, without HTTP. Other requests wait while the
thread issues a load. The limit of the first token is one large copy of as many bytes in this run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch

from benchmark.command import Command
from benchmark.gpu_server.requests import greedy_requests
from benchmark.report import Report
from rigs.models.qwen3_8b import KV_BYTES, dummy_model
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
from sglang.srt.messages.io_struct import Tick
from sglang.srt.process.build import build_scheduler
from sglang.srt.server_args import ServerArgs

LENGTHS: Final = {8192: 7, 32768: 3}
"""Tokens of a prompt, and the number of prompts; L1 holds fewer prompts."""
EXPECTED_MS: Final = {(8192, "issue"): 3.8, (8192, "ttft"): 26, (32768, "ttft"): 97}
TARGET_MS: Final = {(8192, "issue"): 5}
_LINK_BYTES: Final = 1 << 30


@contextmanager
def timed(owner: type, name: str, seconds: list[float]) -> Iterator[None]:
    """Calls of a method inside append their seconds."""
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begun)

    with mock.patch.object(owner, name, call):
        yield


def link_bytes_per_s() -> float:
    """The rate of one large copy to the device."""
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return _LINK_BYTES / statistics.median(times)


def settle(scheduler: Scheduler) -> None:
    """Let the copies to L2 land."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline or not scheduler.is_idle():
        scheduler.step(Tick(time.monotonic(), []))


def hit_s(scheduler: Scheduler, length: int, seed: int) -> tuple[float, float]:
    """Seconds from a prompt's arrival to its only token, and seconds of issuing its load."""
    settle(scheduler)
    requests = greedy_requests(f"{length}-{time.monotonic_ns()}", 1, length, 1, first_seed=seed)
    issues: list[float] = []
    with timed(HiCacheController, "start_loading", issues):
        begun = time.perf_counter()
        scheduler.step(Tick(time.monotonic(), requests))
        while not scheduler.is_idle():
            scheduler.step(Tick(time.monotonic(), []))
        ttft = time.perf_counter() - begun
    return ttft, max(issues)  # Other ticks have no load.


def measure(scheduler: Scheduler, rate: float, report: Report) -> None:
    for length, count in LENGTHS.items():
        for turn in range(4):
            hits = [hit_s(scheduler, length, length + i) for i in range(count)]
            if not turn:
                continue  # The prompts were computed.
            case, limit = {"tokens": length, "turn": turn}, length * KV_BYTES / rate * 1e3
            ttft, issues = zip(*hits, strict=True)
            for name, values, floor in (("issue", issues, None), ("ttft", ttft, limit)):
                report.add(
                    name,
                    statistics.median(values) * 1e3,
                    "ms",
                    case,
                    expected=EXPECTED_MS.get((length, name)),
                    target=TARGET_MS.get((length, name)),
                    limit=floor,
                    raw=[value * 1e3 for value in values],
                )


def run(args: argparse.Namespace, report: Report) -> None:
    rate = link_bytes_per_s()
    report.add("link", rate / 1e9, "GB/s")
    with dummy_model() as model:
        server_args = ServerArgs.from_kwargs(
            model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
            device="cuda", page_size=64, max_total_tokens=40960,
            enable_hierarchical_cache=True, hicache_size=24,
        )  # fmt: skip
        built = build_scheduler(server_args.resolve())
        measure(built.scheduler, rate, report)
        built.scheduler.close()


COMMAND: Final = Command(run=run, devices=("cuda",))

"""Time in which the device waits for the CPU, without and with L2, under a load without hits.

Two schedulers in this process on one GPU, without HTTP, run the same load in turn: Qwen3-8B's shape
with dummy weights, 32 requests at once, 2,048 random tokens in, 128 out. Events around each forward
give its time and the gap after the last one; wrapped functions give the CPU's time in each.
`gpu-hicache unused` has the same load over HTTP.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.gpu_server.requests import greedy_requests
from benchmark.report import Report
from benchmark.timing import median_ratio
from rigs.models.qwen3_8b import dummy_model
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.control import InputHandler
from sglang.srt.managers.scheduler.launched_step import StepResult
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.results import ResultProcessor
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.messages.io_struct import BatchTokenIDOutput, Tick
from sglang.srt.process.build import build_scheduler
from sglang.srt.server_args import ServerArgs

CONCURRENT, INPUT, OUTPUT, REQUESTS = 32, 2048, 128, 96
TIERS: Final[dict[str, dict[str, Any]]] = {
    "GPU only": {},
    "+ L2": {"enable_hierarchical_cache": True, "hicache_size": 12.0},
}


class Probe:
    """Events around forwards and seconds in functions, of the scheduler that runs."""

    def __init__(self) -> None:
        self.forwards: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for owner, name in (
            (HiRadixCache, "check_hicache_events"),
            (HiRadixCache, "start_writing_host_cache"),
            (RadixCache, "cache_unfinished_req"),
            (RadixCache, "cache_finished_req"),
            (PrefillScheduler, "schedule"),
            (ResultProcessor, "process"),
            (StepResult, "wait"),
            (InputHandler, "handle"),
            (Scheduler, "_launch_prefill"),
            (Scheduler, "_launch_decode"),
        ):
            self._time(owner, name)
        self._around_forwards()

    def _time(self, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[f"{owner.__name__}.{name}"] += time.perf_counter() - begun

        setattr(owner, name, timed)

    def _around_forwards(self) -> None:
        inner = Scheduler._forward

        def forward(
            scheduler: Scheduler, batch: ModelWorkerBatch
        ) -> tuple[StepResult, torch.Tensor, torch.Tensor | None]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            is_prefill = batch.forward.extend_seq_lens_cpu is not None
            before.record()
            result = inner(scheduler, batch)
            after.record()
            self.forwards.append((is_prefill, before, after))
            return result

        Scheduler._forward = forward  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, dict[str, float]]:
        """Figures since the last call, by unit."""
        torch.cuda.synchronize()
        busy: defaultdict[str, float] = defaultdict(float)
        idle: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        last: torch.cuda.Event | None = None
        for is_prefill, before, after in self.forwards:
            kind = "prefill" if is_prefill else "decode"
            busy[kind] += before.elapsed_time(after)
            counts[kind] += 1
            if last is not None:
                idle[kind] += last.elapsed_time(before)
            last = after
        spent = {name: value * 1e3 for name, value in sorted(self.seconds.items())}
        self.forwards.clear()
        self.seconds.clear()
        return {
            "ms": {
                **{f"busy_in_{kind}": ms for kind, ms in busy.items()},
                **{f"idle_before_{kind}": ms for kind, ms in idle.items()},
                **{f"cpu_in_{name}": ms for name, ms in spent.items()},
            },
            "count": {f"steps_of_{kind}": count for kind, count in counts.items()},
        }


def run_load(scheduler: Scheduler, seed: int) -> float:
    """Seconds for `REQUESTS` requests, `CONCURRENT` of them under way."""
    messages = greedy_requests(str(seed), REQUESTS, INPUT, OUTPUT, first_seed=seed)
    begun = time.perf_counter()
    arriving, messages = messages[:CONCURRENT], messages[CONCURRENT:]
    ended = 0
    while ended < REQUESTS:
        outputs = scheduler.step(Tick(time.monotonic(), arriving))
        finished = sum(
            one.finish_reason is not None
            for output in outputs
            if isinstance(output, BatchTokenIDOutput)
            for one in output.outputs
        )
        ended += finished
        arriving, messages = messages[:finished], messages[finished:]
    return time.perf_counter() - begun


def _settle(scheduler: Scheduler) -> None:
    """Run until idle, outside of the measurement."""
    until = time.monotonic() + 10
    while not scheduler.is_idle() and time.monotonic() < until:
        scheduler.step(Tick(time.monotonic(), []))


def run(args: argparse.Namespace, report: Report) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in TIERS}
    with dummy_model() as model:
        built = {
            name: build_scheduler(
                ServerArgs.from_kwargs(
                    model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
                    device="cuda", page_size=64, max_total_tokens=98304, **tier,
                ).resolve()
            )
            for name, tier in TIERS.items()
        }  # fmt: skip
        probe = Probe()
        for number in range(-1, args.repeats):
            for place, (name, one) in enumerate(built.items()):
                taken = run_load(one.scheduler, 1 + REQUESTS * (2 * number + 2 + place))
                found = probe.take()
                if number >= 0:
                    seconds[name].append(taken)
                    case = {"scheduler": name, "round": number}
                    report.add("duration", taken, "s", case)
                    for unit, figures in found.items():
                        report.add_all(unit, figures, case)
                _settle(one.scheduler)
        for one in built.values():
            one.scheduler.close()
    without, with_l2 = seconds.values()
    report.add("l2_over_none", median_ratio(with_l2, without), "ratio", raw=list(seconds.values()))


COMMAND: Final = Command(run=run, repeats=3, devices=("cuda",))

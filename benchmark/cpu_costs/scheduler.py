"""The scheduler's share of a decode step: everything in `Scheduler.step` but the forward.

The real scheduler, tree and pools over a tiny random model, in this process and without sockets.
The time of the forward (model and sampling) is subtracted. For each arrangement (page size, with
and without the hierarchical cache): median and p99 milliseconds per decode step. The target is 1 ms
with 16 running requests and any number waiting; `arrival` is the time of each waiting request to
join the queue, all in one tick.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.timing import percentile
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.utils.process import freeze_heap

_CONTEXT = 512
_ARRANGEMENTS: tuple[dict[str, Any], ...] = (
    {"page_size": 1},
    {"page_size": 64},
    {"page_size": 64, "enable_hierarchical_cache": True},
)


class ForwardClock:
    """Adds up the time that forwards take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, forward: Any) -> Any:
        """`forward`, timed."""

        def timed(worker: TpModelWorker, batch: Any) -> Any:
            started = time.perf_counter()
            try:
                return forward(worker, batch)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def measure(
    args: argparse.Namespace, model: Path, settings: dict[str, Any], report: Report
) -> None:
    """Milliseconds of each decode step with all requests running."""
    # While the last requests wait for their prefill, the first ones decode already.
    new_tokens = args.steps + 2 * args.running
    length = args.input_len + new_tokens
    page = settings["page_size"]
    rig = SchedulerRig(
        model,
        pool_tokens=args.running * (-(-length // page) + 1) * page,
        max_requests=args.running,
        max_queued_requests=args.running + args.waiting,
        **settings,
    )
    scheduler = rig.scheduler
    clock = ForwardClock()
    original = TpModelWorker.forward_batch_generation
    messages = [
        rig.request(f"r{index}", prompt(index, args.input_len), greedy(new_tokens), stream=True)
        for index in range(args.running)
    ]
    total, forward = [], []
    with mock.patch.object(TpModelWorker, "forward_batch_generation", clock.wrap(original)):
        rig.step(*messages)
        for _ in range(2 * args.running):
            if len(scheduler.state.queues.decoding) < args.running:
                rig.step()
        assert len(scheduler.state.queues.decoding) == args.running, "not all requests run at once"
        behind = [rig.request(f"w{n}", prompt(n, 16), greedy(1)) for n in range(args.waiting)]
        freeze_heap()
        started = time.perf_counter()
        rig.step(*behind)
        arrivals_s = time.perf_counter() - started
        for index in range(args.steps):
            clock.seconds = 0.0
            started = time.perf_counter()
            scheduler.step(scheduler.make_tick(2000.0 + index))
            total.append((time.perf_counter() - started) * 1000)
            forward.append(clock.seconds * 1000)
    assert len(scheduler.state.queues.decoding) == args.running, "a request ended too early"
    rig.close()
    own = (np.asarray(total) - np.asarray(forward)).round(4).tolist()
    case = {"page_size": page, "hierarchical_cache": "enable_hierarchical_cache" in settings}
    if args.waiting:
        report.add("arrival", arrivals_s * 1e6 / args.waiting, "us", case)
    median = percentile(own, 50)
    report.add("scheduler", median, "ms", case, target="at most 1", raw=own)
    report.add("scheduler_p99", percentile(own, 99), "ms", case)
    report.add("forward", percentile(forward, 50), "ms", case)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=0)


def run(args: argparse.Namespace, report: Report) -> None:
    if args.input_len + args.steps + 2 * args.running > _CONTEXT:
        raise Refused(
            f"--input-len + --steps + 2 * --running: at most {_CONTEXT}, the tiny model's context"
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for settings in _ARRANGEMENTS:
            measure(args, Path(folder), settings, report)


_QUICK: Final = {"running": 4, "input_len": 32, "steps": 10}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)

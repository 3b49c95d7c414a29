"""CPU time of a request by thread, without hits: with HiCache and L3, and without them.

Two schedulers in this process, one on L1 alone and one with L2 and a Mooncake store over TCP,
compute the same kind of random prompts in turn. The clocks count the time of threads. Other work on
the machine makes them noisy (caches) but not meaningless. Busy waiting counts too: of Mooncake's
caller (`hicache-backup`), and of the model's threads for each other, unless `GOMP_SPINCOUNT=1000`
is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.prompts import random_prompts
from benchmark.report import Report
from rigs.bench.cpu_clocks import process_seconds, thread_seconds
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_MODEL_DIR

PROMPT_TOKENS: Final = 1000
NEW_TOKENS: Final = 32
AT_ONCE: Final = 8
PAGE_SIZE: Final = 64
POOL_TOKENS: Final = 16384
_BUSY_POLL_S: Final = 0.001


class CpuClocks:
    """CPU seconds by thread or process.

    Args:
        processes: Other processes, by name.
    """

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self._own = threading.get_native_id()
        self._forward = self._ignored = 0.0

    def read(self) -> defaultdict[str, float]:
        """CPU seconds of each since its begin; threads that are not Python's are the libraries'."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        now: defaultdict[str, float] = defaultdict(float)
        for tid in (int(name) for name in os.listdir("/proc/self/task")):
            if tid != self._own:
                name = python.get(tid, "threads of libraries (model, Mooncake)")
                now[name.split("_")[0]] += thread_seconds(tid)
        for name, pid in self._processes.items():
            now[name] = process_seconds(pid)
        beside = time.thread_time() - self._forward - self._ignored
        now["scheduler beside the forward"] = beside
        now["scheduler in the forward"] = self._forward
        return now

    @contextmanager
    def ignoring_caller(self) -> Iterator[None]:
        """Do not count the calling thread's work inside the block."""
        started = time.thread_time()
        yield
        self._ignored += time.thread_time() - started

    def watch(self, rig: SchedulerRig) -> None:
        """Count the forwards of `rig`."""
        worker: Any = rig.scheduler._resources.worker
        forward = worker.forward_batch_generation

        def timed(batch: Any) -> Any:
            started = time.thread_time()
            try:
                return forward(batch)
            finally:
                self._forward += time.thread_time() - started

        worker.forward_batch_generation = timed


def run_round(rig: SchedulerRig, seed: int, requests: int) -> None:
    """Run `requests` new prompts, `AT_ONCE` at a time."""
    drawn = random_prompts(seed, requests, PROMPT_TOKENS, 64, 2048)
    waiting = deque(enumerate(drawn))
    running: set[str] = set()
    while waiting or running:
        messages = []
        while waiting and len(running) < AT_ONCE:
            number, prompt = waiting.popleft()
            rid = f"{seed}-{number}"
            running.add(rid)
            messages.append(rig.request(rid, prompt, greedy(NEW_TOKENS)))
        rig.step(*messages)
        if not rig.scheduler._did_forward:
            time.sleep(_BUSY_POLL_S)
        running = {rid for rid in running if not is_done(rig, rid)}


def is_done(rig: SchedulerRig, rid: str) -> bool:
    """True if the answer is complete; if so, it is dropped."""
    result = rig.results.get(rid)
    if result is None or result.finish_reason is None:
        return False
    del rig.results[rid]
    return True


def settle(rig: SchedulerRig) -> None:
    """Step until every write has ended."""
    while not rig.scheduler.is_idle():
        rig.step()
        time.sleep(_BUSY_POLL_S)


def measure(rounds: int, *, warm_rounds: int, requests: int) -> dict[str, dict[str, float]]:
    """Median CPU microseconds per request, by arrangement and by thread or process."""
    with ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster(segment_size="512mb"))
        store = {
            "master_server_address": cluster.master.address,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "protocol": "tcp",
        }
        make_rig = partial(
            SchedulerRig,
            Path(BUILTIN_MODEL_DIR),
            pool_tokens=POOL_TOKENS,
            max_requests=64,
            page_size=PAGE_SIZE,
        )
        rigs = {
            "without": make_rig(),
            "with": make_rig(
                enable_hierarchical_cache=True,
                hicache_storage_backend="mooncake",
                hicache_storage_backend_extra_config=json.dumps(store),
            ),
        }
        clocks = CpuClocks({"store node": cluster.nodes[0].pid, "master": cluster.master.pid})
        for rig in rigs.values():
            stack.callback(rig.close)
            clocks.watch(rig)
        spent: dict[str, list[dict[str, float]]] = {name: [] for name in rigs}
        for turn in range(warm_rounds + rounds):
            for number, name in enumerate(rigs if turn % 2 else reversed(rigs)):
                before = clocks.read()
                run_round(rigs[name], 2 * turn + number, requests)
                with clocks.ignoring_caller():
                    settle(rigs[name])
                after = clocks.read()
                if turn >= warm_rounds:
                    spent[name].append({k: after[k] - before[k] for k in after})
    return {name: medians(samples, requests) for name, samples in spent.items()}


def medians(samples: Sequence[Mapping[str, float]], requests: int) -> dict[str, float]:
    """Median microseconds per request; those below one are left out."""
    names = sorted({name for sample in samples for name in sample})
    a_request = 1e6 / requests
    middle = {
        name: statistics.median(sample.get(name, 0.0) for sample in samples) * a_request
        for name in names
    }
    return {name: value for name, value in middle.items() if value >= 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warm-rounds", type=int, default=6, help="not measured [6]")
    parser.add_argument("--requests", type=int, default=12, help="of a round [12]")


def run(args: argparse.Namespace, report: Report) -> None:
    found = measure(args.repeats, warm_rounds=args.warm_rounds, requests=args.requests)
    for name, spent in found.items():
        report.add_all("us/request", spent, {"tiers": name})
    report.add("model_threads", torch.get_num_threads(), "count")


_QUICK: Final = {"repeats": 1, "warm_rounds": 0, "requests": 2}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=20, quick=_QUICK)

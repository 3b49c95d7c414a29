"""The CPU time that KV events take, with a listener, as a share of all that a scheduler takes.

The real scheduler and publisher over the built-in model, on one thread, in this process; another
process listens. Each request is a prompt that nobody has sent before, so every page is published in
L1 and L2, and leaves both again. The ratio divides two CPU times of the same run, which other
programs on the machine hardly change. Target: at most 1%, for the tick alone (`in_ticks`) and with
the publisher's thread (`all`). `events` is the number of events per request.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch

from benchmark.command import Command
from benchmark.report import Report
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.kv_events import ZmqEventPublisher
from sglang.srt.mem_cache.tree.kv_events import KVEventLog
from sglang.srt.utils.network import get_free_port
from sglang.srt.utils.process import freeze_heap

_LISTENER: Final = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
print("listening", flush=True)
while True:
    socket.recv_multipart()
"""
_AT_ONCE: Final = 8


class Share:
    """CPU seconds of functions, of the threads that call them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time counted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started
                self.calls += 1

        return call


@contextmanager
def listening(endpoint: str) -> Iterator[None]:
    """Another process that reads all that is published."""
    command = [sys.executable, "-c", _LISTENER, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def measure(args: argparse.Namespace, page_size: int, report: Report) -> None:
    """CPU seconds of `args.requests` requests, and the part of events in them."""
    ticks, thread, log = Share(), Share(), Share()
    functions = {"stored": log, "removed": log, "take": ticks}
    endpoint = f"tcp://127.0.0.1:{get_free_port()}"
    with ExitStack() as stack:
        for name, share in functions.items():
            timed = share.timed(getattr(KVEventLog, name))
            stack.enter_context(mock.patch.object(KVEventLog, name, timed))
        run = thread.timed(ZmqEventPublisher._run)
        stack.enter_context(mock.patch.object(ZmqEventPublisher, "_run", run))
        publisher = ZmqEventPublisher(KVEventsConfig(endpoint=endpoint))
        stack.enter_context(listening(endpoint))
        rig = SchedulerRig(
            BUILTIN_MODEL_DIR,
            pool_tokens=2 * _AT_ONCE * (args.input_len + args.output_len + page_size),
            page_size=page_size,
            enable_hierarchical_cache=True,
            publish_events=ticks.timed(publisher.publish),
        )
        stack.callback(rig.close)
        number = 0

        def batch() -> None:
            nonlocal number
            messages = []
            for _ in range(_AT_ONCE):
                ids = prompt(number, args.input_len)
                messages.append(rig.request(f"r{number}", ids, greedy(args.output_len)))
                number += 1
            rig.step(*messages)
            while not rig.scheduler.is_idle():
                rig.step()

        batch()
        freeze_heap()
        ticks.seconds = log.seconds = 0.0
        log.calls = 0
        started = time.process_time()
        for _ in range(args.requests // _AT_ONCE):
            batch()
        publisher.shutdown()
        total = time.process_time() - started
    done = args.requests // _AT_ONCE * _AT_ONCE
    case = {"page_size": page_size}
    in_ticks = ticks.seconds + log.seconds
    report.add("cpu", total / done * 1e3, "ms a request", case)
    report.add("events", log.calls / done, "a request", case)
    report.add("in_ticks", 100 * in_ticks / total, "%", case, target="at most 1")
    report.add("all", 100 * (in_ticks + thread.seconds) / total, "%", case, target="at most 1")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    for page_size in (1, 16, 64):
        measure(args, page_size, report)


_QUICK: Final = {"requests": 8, "input_len": 64, "output_len": 4}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)

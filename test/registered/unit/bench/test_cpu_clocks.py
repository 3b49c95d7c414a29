"""CPU clocks resolve the CPU time of a request, which is less than a tick of 10 ms."""

from __future__ import annotations

import os
import threading
import time

import pytest

from rigs.bench.cpu_clocks import process_seconds, thread_seconds
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_clocks_resolve_a_tenth_of_a_millisecond() -> None:
    tid = threading.get_native_id()
    for _ in range(20):
        before = process_seconds(os.getpid()), thread_seconds(tid)
        end = time.thread_time() + 1e-4
        while time.thread_time() < end:
            pass
        after = process_seconds(os.getpid()), thread_seconds(tid)
        assert min(after[0] - before[0], after[1] - before[1]) >= 1e-4


def test_unknown_ids_have_no_clock() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError):
        process_seconds(child)

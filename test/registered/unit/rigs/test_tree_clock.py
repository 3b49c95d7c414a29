"""The CPU time of a tree of processes."""

from __future__ import annotations

import subprocess
import sys

from rigs.tree_clock import TreeClock
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

BUSY = "while True: pass"


def test_children_count_as_long_as_they_live() -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        clock = TreeClock(process.pid)

        def has_counted() -> bool:
            clock.sample()
            return clock.seconds > 0.3

        try:
            assert wait_until(has_counted, 60)
        finally:
            kill_process_tree(process.pid)
    counted = clock.seconds
    clock.sample()
    assert clock.seconds == counted, "what has ended stays counted"

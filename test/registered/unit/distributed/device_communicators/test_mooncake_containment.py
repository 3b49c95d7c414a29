"""Uncaught C++ exceptions that are not of Mooncake's parser end the process, as ever.

`test_faults_f3.py` has those of the parser, in a server.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

TERMINATE = """
import ctypes, threading
from sglang.srt.distributed.device_communicators.mooncake_library import contain_parser_errors
contain_parser_errors()
contain_parser_errors()
{then}
"""


def run(then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TERMINATE.format(then=then)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_termination_without_a_parser_error_ends_the_process() -> None:
    done = run(
        "end = ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']\n"
        "thread = threading.Thread(target=end)\nthread.start()\nthread.join()\nprint('alive')"
    )
    assert done.returncode == -signal.SIGABRT
    assert "alive" not in done.stdout
    # Said by the handler that was there before.
    assert "terminate called without an active exception" in done.stderr


def test_a_process_with_the_handler_exits_in_order() -> None:
    done = run("print('alive')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")

"""Mooncake's lines in this process's log. `mem_cache/test_mooncake_log.py` has a real store."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

import pytest

from sglang.srt.distributed.device_communicators.mooncake_log import MooncakeLog
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

HEAD = "1124 20:32:29.516996 21793 transfer_task.cpp:800] "
LAST_WORDS = """
import ctypes
from sglang.srt.distributed.device_communicators import mooncake_library, mooncake_log
mooncake_library.load_transfer_engine()
log = mooncake_log.mooncake_log()
libc = ctypes.CDLL(None)
libc.fputs(b"F1124 20:32:29.5 7 some.cpp:1] last words\\n", log.stream)
glog = mooncake_log.open_loaded("/", "libglog")
glog["_ZN6google10LogMessage4FailEv"]()
print("alive")
"""


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_lines_of_one_place_are_one_line_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = MooncakeLog()
    log.pass_on([f"E{HEAD}Batch {number} failed" for number in range(40)])
    log.pass_on([f"E{HEAD}Batch 40 failed", f"W{HEAD.replace('800', '9')}something else"])
    assert said(caplog) == [
        (logging.ERROR, "Mooncake, transfer_task.cpp:800: Batch 0 failed (40 such lines at once)"),
        (logging.WARNING, "Mooncake, transfer_task.cpp:9: something else"),
    ]


def test_what_means_nothing_is_left_out_and_the_rest_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    MooncakeLog().pass_on(
        [
            "WARNING: Logging before InitGoogleLogging() is written to STDERR",
            f"E{HEAD}Local segment descriptor not found",
            "",
            f"I{HEAD}first",
            f"I{HEAD}second",
            f"F{HEAD}Check failed: x",
            "*** Check failure stack trace: ***",
        ]
    )
    assert said(caplog) == [
        (logging.INFO, "Mooncake, transfer_task.cpp:800: first"),
        (logging.INFO, "Mooncake, transfer_task.cpp:800: second"),
        (logging.CRITICAL, "Mooncake, transfer_task.cpp:800: Check failed: x"),
        (logging.WARNING, "Mooncake, further: *** Check failure stack trace: ***"),
    ]


def test_the_last_words_of_a_fatal_error_are_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_WORDS],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGABRT
    assert "some.cpp:1] last words" in done.stderr
    assert "alive" not in done.stdout

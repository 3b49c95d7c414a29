"""Freed memory returns to the system, once for several large uses at a time."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys

import pytest

from sglang.srt.environ import child_environment
from sglang.srt.utils import process
from sglang.srt.utils.process import HeapTrimmer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SCRIPT = """
import psutil
from sglang.srt.utils.process import trim_heap
pieces = [b"x" * 60_000 for _ in range(4000)]
last = [b"x" * 60_000]
del pieces
before = psutil.Process().memory_info().rss
trim_heap()
print((before - psutil.Process().memory_info().rss) >> 20)
"""


def test_simultaneous_large_uses_share_one_return(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    async def run() -> None:
        monkeypatch.setattr(process, "trim_heap", lambda: times.append(1))
        returner = HeapTrimmer(quiet_seconds=0.01)
        for rounds in (1, 2):
            for _ in range(100):
                returner.trim_soon()
            async with asyncio.timeout(10):
                while len(times) < rounds:
                    await asyncio.sleep(0.005)

    asyncio.run(run())
    assert len(times) == 2


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not the C library that keeps memory"
)
def test_memory_freed_below_a_live_object_is_returned() -> None:
    # A process of its own, because memory that this process freed earlier would count too.
    env = child_environment({"MALLOC_MMAP_THRESHOLD_": "1000000"})
    said = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert int(said.stdout) > 150, said.stderr

"""A rank that ends or stops in a prefill, in a load from L2, or at L3, with and without context
parallelism: the server ends, and says which rank it was."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
import pytest

from rigs.schedulers import rank_faults
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.environ import envs
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")

END_S: Final = 40.0
"""Seconds in which a server ends at the latest; it needs ten on a machine that is idle else."""
PAGE: Final = 16
CP: Final = ("--attn-cp-size", "2")
CASES: Final = {
    ("prefill", signal.SIGKILL): (),
    ("prefill", signal.SIGSTOP): CP,
    ("load", signal.SIGSTOP): (),
    ("load", signal.SIGKILL): CP,
    ("write", signal.SIGKILL): (),
    ("write", signal.SIGSTOP): CP,
    ("read", signal.SIGSTOP): (),
    ("read", signal.SIGKILL): CP,
}
WORDS: Final = {
    signal.SIGKILL: r"scheduler\S*_TP1 \(pid \d+, killed by SIGKILL\)",
    signal.SIGSTOP: "rank 1 has given no sign of life for 8 s",
}


def server_of(stage: str, sig: signal.Signals, flags: tuple[str, ...], store: Path) -> ForkedServer:
    return ForkedServer(
        "--tp-size", "2", "--device", "cpu", "--page-size", str(PAGE), "--max-total-tokens", "1024",
        "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE}), *flags,
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(store)},
        in_rank=functools.partial(rank_faults.ends_in, stage, sig),
    )  # fmt: skip


def ask(server: ForkedServer) -> None:
    """A prompt cold, from L3, and from L2."""
    ids = prompt(1, 200)
    server.generate(ids)
    server.flush()
    server.generate(ids)
    for seed in range(100, 105):
        server.generate(prompt(seed, 220), max_new_tokens=1)
    server.generate(ids)


def provoke(stage: str, sig: signal.Signals, flags: tuple[str, ...], store: Path) -> str:
    """The server's last words."""
    with server_of(stage, sig, flags, store) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        with contextlib.suppress(AssertionError, urllib.error.URLError, OSError):
            ask(server)
            pytest.fail(f"{stage}: all requests were answered")
        status = server.process.wait(END_S)
        last = server.process.log_tail(8)
    assert wait_until(lambda: not any(map(is_alive, family)), 60), "processes are left"
    assert status == 1
    assert last.endswith("; the server ends"), last
    assert re.search(WORDS[sig], last), last
    return last


def test_a_rank_that_is_gone_in_the_middle_ends_the_server(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        ends = {
            case: pool.submit(provoke, *case, flags, tmp_path / "-".join(case[:1] + flags))
            for case, flags in CASES.items()
        }
        for (stage, sig), end in ends.items():
            print(f"{sig.name} in a {stage}: {end.result()}")

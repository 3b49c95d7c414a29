"""`sglang_router.launch_server`, the router's own program, starts servers of this engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from sglang.srt.utils.network import get_free_port, wait_until
from sglang.srt.utils.process import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=27, suite="base-b-test-cpu")


def serves(url: str) -> bool:
    question = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    try:
        reply = httpx.post(f"{url}/generate", json=question, timeout=10)
    except httpx.TransportError:
        return False
    return reply.status_code == 200 and reply.json()["meta_info"]["completion_tokens"] == 4


def healthy(url: str) -> int:
    """Number of servers that the router holds to be healthy."""
    workers = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
    return sum(one["is_healthy"] for one in workers)


def test_it_starts_servers_and_a_router(tmp_path: Path) -> None:
    port, base = get_free_port(), get_free_port()
    command = [sys.executable, "-m", "sglang_router.launch_server", "--dp-size", "2"]
    command += ["--port", str(port), "--router-dp-worker-base-port", str(base)]
    command += ["--max-total-tokens", "4096", "--page-size", "16"]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w+") as log:
        program = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            assert wait_until(lambda: serves(url), 240), (tmp_path / "log").read_text()
            assert wait_until(lambda: healthy(url) == 2, 60), (tmp_path / "log").read_text()
            children = psutil.Process(program.pid).children(recursive=True)
            program.send_signal(signal.SIGTERM)
            program.wait(60)
            gone, alive = psutil.wait_procs(children, timeout=120)
            assert gone and not alive
        finally:
            if program.poll() is None:
                kill_process_tree(program.pid)
                program.wait()

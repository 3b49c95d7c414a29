"""`make serve-pd`: both servers and the router answer, and end with it; errors are one line."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from sglang.embedded_mooncake import ChildStartError
from sglang.embedded_router import Router
from sglang.serve_embedded import QUESTION, STORAGE_FLAGS
from sglang.serve_pd import Plan, plan
from sglang.srt.environ import child_environment
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import get_free_port, is_healthy, wait_until
from sglang.srt.utils.process import is_alive, kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=50, suite="base-b-test-cpu")

COMMAND = [sys.executable, "-m", "sglang.serve_pd"]
TIMEOUT = 180
PORTS = (1001, 1002, 1003)


def planned(*argv: str, num_gpus: int = 0) -> Plan:
    return plan(prepare_server_args([*STORAGE_FLAGS, *argv]), argv, PORTS, num_gpus)


def servers(parts: Plan) -> tuple[ServerArgs, ServerArgs]:
    return prepare_server_args(parts.prefill), prepare_server_args(parts.decode)


def test_the_flags_are_divided_between_the_servers() -> None:
    prefill, decode = servers(planned("--dtype", "float32", "--hicache-size", "1", "--port", "5"))
    assert (prefill.disaggregation_mode, prefill.port) == ("prefill", 1001)
    assert prefill.disaggregation_bootstrap_port == 1002
    assert (prefill.hicache_storage_backend, prefill.hicache_size) == ("mooncake", 1)
    assert (decode.disaggregation_mode, decode.port) == ("decode", 1003)
    assert not decode.enable_hierarchical_cache
    assert prefill.page_size == decode.page_size == 64
    assert prefill.dtype == decode.dtype == "float32"
    smaller = servers(planned("--hicache-storage-backend=mooncake", "--page-size", "16"))
    assert [one.page_size for one in smaller] == [16, 16]


@pytest.mark.parametrize(
    ("flags", "num_gpus", "gpus"),
    [
        ((), 0, (0, 0)),
        ((), 1, (0, 0)),
        ((), 2, (0, 1)),
        (("--base-gpu-id", "2"), 4, (2, 3)),
        (("--tp-size", "2"), 4, (0, 2)),
        (("--tp-size", "2"), 3, (0, 0)),
        (("--device", "cpu"), 2, (0, 0)),
    ],
)
def test_with_enough_gpus_each_server_has_its_own(
    flags: tuple[str, ...], num_gpus: int, gpus: tuple[int, int]
) -> None:
    prefill, decode = servers(planned(*flags, num_gpus=num_gpus))
    assert (prefill.base_gpu_id, decode.base_gpu_id) == gpus


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--api-key", "k"), "^--api-key: the router here has no keys"),
        (("--admin-api-key", "k"), "^--admin-api-key: the router"),
        (("--disaggregation-mode", "decode"), "^--disaggregation-mode decode: both kinds of"),
        (("--disaggregation-mode", "prefill"), "^--disaggregation-mode prefill: both kinds of"),
        (("--tp-size", "2", "--attn-cp-size", "2"), "^--attn-cp-size 2 has no use with .* decode"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(*flags)


def test_it_answers_and_leaves_no_process(tmp_path: Path) -> None:
    port = get_free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([*COMMAND, "--port", str(port)], stdout=out, stderr=out)
    try:
        assert wait_until(
            lambda: "Ctrl-C ends it" in log.read_text() or process.poll() is not None, TIMEOUT
        )
        text = log.read_text()
        answer = text.split(QUESTION, 1)[1]
        assert "'7391'" in answer.split("serve-pd:", 1)[0], text
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 9  # master, node, router, and two servers of three processes
        command = shlex.split(re.findall(r"^curl .*", text, re.MULTILINE)[-1])
        found = json.loads(subprocess.check_output(command, timeout=60))
        assert found["choices"][0]["message"]["content"] == "2846"
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
        assert wait_until(lambda: not any(map(is_alive, family)), 30)
        assert not is_healthy(url)
        assert not Path(text.splitlines()[0].removeprefix("serve-pd: the logs are in ")).exists()
    finally:
        if process.poll() is None:
            kill_process_tree(process.pid)


def test_a_missing_router_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    with pytest.raises(ChildStartError, match="sglang_router is missing: pip install sglang-rout"):
        Router([], [], port=1, log_dir=tmp_path)


def run(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv],
        env=child_environment({"ONCE": "1", **(env or {})}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_a_port_in_use_gives_one_line_before_any_process_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"serve-pd: error: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in done.stderr
    assert "runs" not in done.stdout


def test_a_server_that_does_not_start_ends_all_and_leaves_the_logs(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    done = run("--port", str(get_free_port()), "--max-total-tokens", "1000000000000", env=env)
    assert done.returncode == 1
    assert "serve-pd: error: prefill_server ended with status 1 (" in done.stderr
    assert "store_node runs" in done.stdout
    assert "decode_server runs" not in done.stdout
    (log_dir,) = tmp_path.glob("sglang-serve-pd-*")
    assert f"serve-pd: the logs stay in {log_dir}" in done.stderr
    assert "--max-total-tokens" in (log_dir / "prefill_server.log").read_text()

"""A real server's names in the log and in ps, and its ends by signals (row F5)."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.handshake_bombs import tcp_listeners
from sglang.srt.entrypoints.http_server import READY_LINE
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-b-test-cpu")

LONG: dict[str, Any] = {
    "text": "a",
    "stream": True,
    "sampling_params": {"max_new_tokens": 120, "ignore_eos": True},
}
ENDLESS: dict[str, Any] = {
    "text": "a",
    "stream": True,
    "sampling_params": {"max_new_tokens": 16000, "ignore_eos": True},
}

GONE_S = 60.0
"""Seconds for a server to end, on a busy machine."""


class Stream:
    """A streaming request in a thread, and the lines it has got so far."""

    def __init__(self, server: EngineServer, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._url = f"{server.url}/generate"
        self._body = body
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert wait_until(lambda: len(self.lines) > 2, 60), "the stream did not start"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
        except httpx.TransportError:
            self.lines.append("broken")

    def end(self) -> list[str]:
        self._thread.join(60)
        return self.lines


def children_of(server: EngineServer) -> list[psutil.Process]:
    """Detokenizer and scheduler, in the order of their memory."""
    found = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    return sorted(found, key=lambda child: child.memory_info().rss)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_log_and_ps_say_what_runs_and_sigterm_lets_running_requests_finish() -> None:
    api = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    with EngineServer() as server:
        children = children_of(server)
        family = [psutil.Process(server.process.pid), *children]
        titles = {" ".join(process.cmdline()).rstrip() for process in family}
        # Scripts that end a server look for its module's name.
        server_title = f"sglang::server sglang.launch_server {server.url}"
        assert len(children) == 2
        assert titles == {server_title, "sglang::scheduler", "sglang::detokenizer"}
        log = server.process.log_tail()
        assert f"starting sglang-builtin for {server.url}" in log
        assert f"{READY_LINE} {server.url}" in log
        assert "sampling defaults: temperature 1, " in log
        ports = [port for process in family for _, port in tcp_listeners(process.pid)]
        assert server.url.endswith(f":{ports[0]}") and len(ports) == 1, "no gloo for one rank"

        stream = Stream(server, LONG)
        server.process.send_signal(signal.SIGTERM)
        lines = stream.end()
        assert lines[-1] == "data: [DONE]"
        meta = json.loads(lines[-2].removeprefix("data: "))["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 120}
        assert server.process.wait(GONE_S) == 0
        assert wait_until(lambda: all_gone(children), GONE_S)
    assert READY_LINE in api


def test_a_second_signal_kills() -> None:
    with ForkedServer() as server:
        children = children_of(server)
        stream = Stream(server, ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "draining" in server.process.log_tail(), GONE_S)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(GONE_S) == 128 + signal.SIGINT
        stream.end()
        assert wait_until(lambda: all_gone(children), GONE_S)

"""A real server's ends: drained by SIGTERM (row F5), killed children (row F6), killed itself."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sglang.srt.entrypoints.http_server import READY_LINE
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_server import EngineServer

register_cpu_ci(est_time=60, suite="base-b-test-cpu")

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
"""For a server to end, on a busy machine."""


class Stream:
    """A streaming request in a thread, and the lines it has got so far."""

    def __init__(self, server: EngineServer, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._url = f"{server.url}/generate"
        self._body = body
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert wait_until(lambda: len(self.lines) > 2, 30), "the stream did not start"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
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


def test_log_and_ps_say_what_runs() -> None:
    api = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    with EngineServer("--api-key", "hunter2") as server:
        family = [psutil.Process(server.process.pid), *children_of(server)]
        titles = {" ".join(process.cmdline()).rstrip() for process in family}
        # Scripts that end a server look for its module's name.
        server_title = f"sglang::server sglang.launch_server {server.url}"
        assert titles == {server_title, "sglang::scheduler", "sglang::detokenizer"}
        log = server.process.log_tail()
        assert f"starting sglang-builtin for {server.url}" in log
        assert f"{READY_LINE} {server.url}" in log
    assert READY_LINE in api


def test_sigterm_lets_running_requests_finish() -> None:
    with EngineServer() as server:
        children = children_of(server)
        assert len(children) == 2
        stream = Stream(server, LONG)
        server.process.send_signal(signal.SIGTERM)
        lines = stream.end()
        assert lines[-1] == "data: [DONE]"
        meta = json.loads(lines[-2].removeprefix("data: "))["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 120}
        assert server.process.wait(GONE_S) == 0
        assert wait_until(lambda: all_gone(children), GONE_S)


def test_a_second_signal_kills() -> None:
    with EngineServer() as server:
        children = children_of(server)
        stream = Stream(server, ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "draining" in server.process.log_tail(), GONE_S)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(GONE_S) == 128 + signal.SIGINT
        stream.end()
        assert wait_until(lambda: all_gone(children), GONE_S)


@pytest.mark.parametrize("which", ["detokenizer", "scheduler"])
def test_a_dead_child_ends_the_server_with_the_cause(which: str) -> None:
    with EngineServer() as server:
        children = children_of(server)
        stream = Stream(server, ENDLESS)
        children[0 if which == "detokenizer" else 1].kill()
        assert server.process.wait(GONE_S) == 1
        assert any('"error"' in line for line in stream.end()[-2:])
        last = server.process.log_tail(1)
        assert which in last
        assert "SIGKILL" in last
        assert wait_until(lambda: all_gone(children), GONE_S)


def test_a_killed_server_takes_its_children_along_and_can_be_started_again() -> None:
    with EngineServer() as server:
        children = children_of(server)
        server.process.kill()
        server.process.wait()
        assert wait_until(lambda: all_gone(children), GONE_S)
        server.start()
        assert server.generate("hello").output_ids


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""Rows F5 and F6 on real servers: their end after a signal, and after the death of a process."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from rigs.running_clock import RunningClock
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.utils.network import is_port_available, wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-b-test-cpu")

PAGE: Final = 64
PAGES: Final = 120
PROMPT: Final = [300 + (number * 7919) % 1500 for number in range(PAGES * PAGE + 10)]
DRAIN_BOUND_S: Final = 20.0
DEATH_BOUND_S: Final = 10.0
GONE_S: Final = 30.0
"""Seconds for killed processes to end, on a busy machine."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l3")


@pytest.fixture
def server(storage: Path) -> Iterator[EngineServer]:
    flags = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy")
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
    with ForkedServer(*flags, "wait_complete", *EXACT, env=env) as running:
        yield running


def stored_pages(storage: Path) -> int:
    return len(list(storage.glob("*/??/*")))


def log_of(server: EngineServer) -> str:
    return server.process.log_path.read_text(errors="replace")


def members(server: EngineServer) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def member_listening_on(server: EngineServer, name: str) -> psutil.Process:
    """The child that owns the ipc socket called `name`, of the first DP group."""
    for member in members(server):
        for connection in member.net_connections("unix"):
            if str(connection.laddr).endswith((f"/{name}", f"/{name}_0")):
                return member
    raise AssertionError(f"no process listens on {name}")


def ipc_directory(server: EngineServer) -> Path:
    for connection in psutil.Process(server.process.pid).net_connections("unix"):
        if "sglang-ipc-" in str(connection.laddr):
            return Path(str(connection.laddr)).parent
    raise AssertionError("the server has no ipc socket")


class Client(threading.Thread):
    """A thread with one request in flight; `status` and `last` have its result."""

    def __init__(self, server: EngineServer, stream: bool, prompt: list[int], tokens: int) -> None:
        super().__init__()
        self._url = f"{server.url}/generate"
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self._body = {"input_ids": prompt, "sampling_params": params, "stream": stream}
        self.begun = threading.Event()
        self.status: int | None = None
        self.last: Any = None
        """The answer, the last event, or the exception's text."""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.begun.set()
                    if line and line != "data: [DONE]":
                        self.last = json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.last = {"error": {"message": repr(error)}}


def test_f5_sigterm_drains_writes_back_and_exits_0(server: EngineServer, storage: Path) -> None:
    idle = httpx.Client()  # An open connection must not delay the end.
    idle.get(f"{server.url}/health")
    request = Client(server, False, PROMPT, 8)
    assert wait_until(lambda: server.request("GET", "/get_load").body[0]["num_reqs"] == 1, 60, 0.01)
    written = stored_pages(storage)
    with RunningClock() as clock:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert clock() < DRAIN_BOUND_S
    idle.close()
    request.join()
    assert request.status == 200
    assert request.last["meta_info"]["completion_tokens"] == 8
    # At the signal some pages were not written yet; now all of them are.
    assert written < PAGES
    assert stored_pages(storage) >= PAGES
    assert "Traceback" not in log_of(server)
    assert is_port_available("127.0.0.1", int(server.url.rsplit(":", 1)[1]))


def test_f5_storage_survives_sigterm_and_sigkill_does_not_hinder_a_restart(
    server: EngineServer, storage: Path
) -> None:
    server.generate(PROMPT, max_new_tokens=1)
    assert server.stop() == 0
    server.start()
    answer = server.generate(PROMPT, max_new_tokens=4)
    assert answer.cached["storage"] >= (PAGES - 1) * PAGE
    # The server is killed while it computes, writes and streams.
    other = [token + 1 for token in PROMPT]
    running = [Client(server, True, [300, 301], 8000), Client(server, False, other, 300)]
    assert running[0].begun.wait(60)
    family, directory = members(server), ipc_directory(server)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(GONE_S)
    assert wait_until(lambda: not any(map(is_alive, family)), GONE_S, 0.02), family
    for client in running:
        client.join(GONE_S)
        assert "error" in client.last
    assert is_port_available("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    # The last process removes the directory, as after a normal end.
    assert not directory.exists()
    server.start()
    again = server.generate(PROMPT, max_new_tokens=4)
    assert again.cached["storage"] >= (PAGES - 1) * PAGE
    assert again.output_ids == answer.output_ids
    server.generate(other, max_new_tokens=4)
    kill_and_judge(server, "scheduler")


def left_in(directory: str) -> list[str]:
    """Names in a directory of temporary files, but torch's own: 2.11 leaves one there."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("torchinductor_"))


def is_unlocked(directory: Path) -> bool:
    """True if no process holds the lock of an engine's directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_f5_the_next_start_cleans_up_after_a_process_tree_killed_at_once() -> None:
    # A short prefix, because paths of Unix sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="f5-") as parent:
        env = {"TMPDIR": parent}
        with ForkedServer(env=env) as killed, ForkedServer(env=env) as living:
            orphan, kept = ipc_directory(killed), ipc_directory(living)
            family = members(killed)
            for member in family:
                member.suspend()  # No process may notice a death and clean up.
            for member in family:
                member.kill()
            killed.process.wait(GONE_S)
            assert wait_until(lambda: not any(map(is_alive, family)), GONE_S, 0.02), family
            assert sorted(os.listdir(orphan)) == ["detokenizer", "scheduler_0", "tokenizer"]
            # A process looks dead while its last threads still hold its files.
            assert wait_until(lambda: is_unlocked(orphan), GONE_S, 0.02)
            killed.start()
            assert not orphan.exists()
            assert f"removed {orphan}" in log_of(killed)
            assert left_in(parent) == sorted([kept.name, ipc_directory(killed).name])
            for server in (killed, living):
                assert server.generate("name", max_new_tokens=2).output_ids
                assert server.stop() == 0
        assert left_in(parent) == []


def test_f6_the_detokenizers_death_ends_the_server(server: EngineServer) -> None:
    kill_and_judge(server, "detokenizer")


def kill_and_judge(server: EngineServer, name: str) -> None:
    """Kill one child with requests in flight, and check the end of server and clients (row F6)."""
    clients = [Client(server, stream, [300, 301], 8000) for stream in (True, False, True)]
    assert clients[0].begun.wait(60)
    assert clients[2].begun.wait(60)
    family, directory = members(server), ipc_directory(server)
    victim = member_listening_on(server, name)
    victim.kill()
    with RunningClock() as clock:
        status = server.process.wait(30)
        assert status == 1
        assert clock() < DEATH_BOUND_S
    for client in clients:
        client.join(GONE_S)
        assert not client.is_alive()
        assert name in client.last["error"]["message"], client.last
    assert clients[1].status == 503
    assert wait_until(lambda: not any(map(is_alive, family)), GONE_S, 0.02), family
    assert not directory.exists()
    last = server.process.log_tail(2)
    assert f"{name} (pid {victim.pid}, killed by SIGKILL); " in last
    assert "the kernel's OOM killer" in last and "lower --mem-fraction-static" in last
    assert "Traceback" not in log_of(server)

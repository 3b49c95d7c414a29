"""Starting servers and ending them, for tests that use real processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from sglang.srt.environ import child_environment
from sglang.srt.utils.network import get_free_port, is_healthy, wait_until
from sglang.srt.utils.process import kill_process_tree as kill_process_tree  # SGLang's path

DEFAULT_URL_FOR_TEST: Final = "http://127.0.0.1:21000"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH: Final = 120.0
"""Seconds, for a CPU machine that runs other tests at the same time."""
_LOG_LINES: Final = 30


class CustomTestCase(unittest.TestCase):
    """A `TestCase` that can wait for a condition instead of sleeping."""

    def wait_until(
        self, condition: Callable[[], bool], timeout: float = 10.0, message: str = ""
    ) -> None:
        """Fail unless `condition` holds within `timeout` seconds."""
        if not wait_until(condition, timeout):
            self.fail(f"not within {timeout:.0f} s: {message or condition}")


class RunningServer(Protocol):
    """A server's process, like `subprocess.Popen`; its output is in `log_path`."""

    pid: int
    log_path: Path

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def log_tail(self, lines: int = _LOG_LINES) -> str: ...


class ServerProcess(subprocess.Popen[bytes]):
    """A server that `popen_launch_server` started; its output is in `log_path`."""

    log_path: Path

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines that the server wrote."""
        return tail_of(self.log_path, lines)


def tail_of(path: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a file of text."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def new_log_path() -> Path:
    """A new temporary file for the output of a server."""
    with tempfile.NamedTemporaryFile(prefix="sglang-server-", suffix=".log", delete=False) as file:
        return Path(file.name)


def find_available_port(base_port: int | None = None) -> int:
    """A free TCP port of the loopback interface.

    Args:
        base_port: Ignored; SGLang's tests pass it, but here the system chooses the port.
    """
    del base_port
    return get_free_port()


def popen_launch_server(
    model: str | None,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
) -> ServerProcess:
    """Start `python -m sglang.launch_server` and wait until `/health` answers 200.

    Args:
        model: Directory of a checkpoint; None serves the built-in model.
        base_url: URL of the server, e.g. `http://127.0.0.1:21000`.
        timeout: Seconds until it must be healthy.
        api_key: Value of `--api-key`, also sent with the health request.
        other_args: Further flags.
        env: Added to this process's environment.
        log_path: None: a new temporary file.

    Raises:
        RuntimeError: The server ended before it was healthy. Has its last log lines.
        TimeoutError: It was not healthy in time, and was killed. Has its last log lines.
    """
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *server_flags(model, base_url, other_args, api_key),
    ]
    if log_path is None:
        log_path = new_log_path()
    with log_path.open("ab") as log:
        process = ServerProcess(
            command,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    process.log_path = log_path
    try:
        await_health(process, base_url, timeout, api_key)
    except BaseException:
        if process.poll() is None:
            kill_process_tree(process.pid)
        process.wait()
        raise
    return process


def server_flags(
    model: str | None, base_url: str, other_args: Sequence[str] = (), api_key: str | None = None
) -> list[str]:
    """The command line of a server after its module's name; see `popen_launch_server`.

    Raises:
        ValueError: `base_url` has no host or no port.
    """
    url = urllib.parse.urlsplit(base_url)
    if url.hostname is None or url.port is None:
        raise ValueError(f"base_url {base_url!r}: give host and port, e.g. {DEFAULT_URL_FOR_TEST}")
    flags = [] if model is None else ["--model-path", model]
    flags += ["--host", url.hostname, "--port", str(url.port), *other_args]
    return flags if api_key is None else [*flags, "--api-key", api_key]


def await_health(
    process: RunningServer, base_url: str, timeout: float, api_key: str | None = None
) -> None:
    """Wait until `/health` answers 200. Raises as `popen_launch_server`."""
    deadline = time.monotonic() + timeout
    while not is_healthy(base_url, api_key):
        status = process.poll()
        if status is not None:
            raise RuntimeError(
                f"the server ended with status {status} before it was healthy; "
                f"the last lines of {process.log_path}:\n{process.log_tail()}"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the server was not healthy within {timeout:.0f} s; "
                f"the last lines of {process.log_path}:\n{process.log_tail()}"
            )
        time.sleep(0.1)

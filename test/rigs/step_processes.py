"""Processes that run test files: started as commands, or forked from one that has imported torch.

Imports of torch and the engine take a core five seconds, more than the tests of many files. In a
forked process all else is as for `python WORDS`: arguments, output, exit status and exit handlers.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock

from rigs.shared_processes import SharedProcess
from sglang.srt.environ import child_environment

_PRELOADED: Final = [
    "rigs.servers.forked_servers",
    "rigs.models.tiny_models",
    "rigs.disaggregation.pd_processes",
    "rigs.step_processes",
    "hypothesis",
    "openai",
    "pytest",
]
"""Modules to import first. The first one imports all that the engine does, the second what
transformers imports for a model: files and servers would take 3.6 and 1.4 seconds for the latter.
"""
_NO_LEAKS: Final = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Keeps the tracker's warning from following the summary."""


def preload(env: Mapping[str, str]) -> None:
    """Start the process from which files are forked, with `env` added to its environment."""
    # Servers that tests kill leave semaphores, which the tracker removes at the end.
    with mock.patch.dict(os.environ, {"PYTHONWARNINGS": _NO_LEAKS}):  # noqa: TID251 - of a child
        resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, env):  # noqa: TID251 - of a child
        forkserver.ensure_running()


class StartedCommand:
    """A command in a session of its own.

    Args:
        command: Program and arguments.
        env: Added to this process's environment.
        cwd: Its working directory.
        is_shown: Print the output as it comes.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, *, is_shown: bool
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(is_shown,), daemon=True)
        self._reader.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, None before `wait` has returned it."""
        return self._process.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def lines(self) -> list[str]:
        """All that it has printed, once it has ended."""
        self._reader.join(timeout=5)
        return self._lines

    def _read(self, is_shown: bool) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
            if is_shown:
                print(line, end="", flush=True)


class ForkedPython:
    """`python WORDS`, in a session of its own. Any thread may make one, after `preload`.

    Args:
        words: A file, absolute or relative to `cwd`, or `-m` and a module; then arguments.
        cwd: Its working directory.
    """

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        # The output goes to a file: a pipe that nobody reads would stop the process.
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by `lines`
        self._process = SharedProcess(target=_run, args=(list(words), cwd, self._output.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        connection.wait([self._process.sentinel], timeout)
        status = self.returncode
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return status

    def lines(self) -> list[str]:
        """All that it has printed, once it has ended."""
        with self._output:
            return self._output.read().decode(errors="replace").splitlines()


def _run(words: list[str], cwd: Path, output: str) -> None:
    os.setsid()
    # No collection visits what is imported, here and in the children's fork server: it would take
    # 0.3 CPU seconds, and copy all pages that the processes share.
    gc.freeze()
    out = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(out, stream.fileno())
    os.close(out)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    # Modules beside the file are found, as when Python runs it.
    sys.path[0] = str(cwd) if is_module else os.path.dirname(os.path.abspath(words[0]))
    fork_a_fork_server()
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        # A process of `multiprocessing` leaves without them. pytest's remove old directories.
        atexit._run_exitfuncs()


def fork_a_fork_server() -> None:
    """Fork the process from which `multiprocessing` will fork this process's children.

    Python would start a new one, which imports all again, with the first child. This one is forked
    while the process has no other threads; it gets the environment and the modules to preload with
    the first child.
    """
    server: Any = forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
    listener.listen()
    start_r, start_w = os.pipe()
    alive_r, alive_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_w)
        os.close(start_w)
        _serve_forks(start_r, listener.detach(), alive_r)
    os.close(alive_r)
    os.close(start_r)
    address = listener.getsockname()
    listener.close()

    def ensure_running() -> None:
        with server._lock:
            if server._forkserver_pid is None:
                line = json.dumps([dict(os.environ), server._preload_modules])  # noqa: TID251
                with open(start_w, "w") as start:
                    start.write(line + "\n")
                server._forkserver_address = address
                server._forkserver_alive_fd = alive_w
                server._forkserver_pid = pid
        # Starts one as Python does if this one has died.
        forkserver.ForkServer.ensure_running(server)

    server.ensure_running = ensure_running


def _serve_forks(start: int, listener: int, alive: int) -> NoReturn:
    """Serve from the first line of the pipe `start` to the end of the pipe `alive`. A file that
    needs no children ends `start` without a line."""
    try:
        with open(start) as pipe:
            line = pipe.readline()
        if line:
            env, modules = json.loads(line)
            os.environ.clear()  # noqa: TID251 - of a child
            os.environ.update(env)  # noqa: TID251
            forkserver.main(listener, alive, modules)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(0)

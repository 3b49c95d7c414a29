"""Real servers that start in a second: their processes are forked from one that has imported all.

A server of four ranks imports torch five times otherwise, which takes two cores fifteen seconds.
All else is as `python -m sglang.launch_server` does it: processes, sockets, signals, exit statuses.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
import xgrammar

from rigs.machines.networks import enter
from rigs.servers.engine_server import EngineServer
from rigs.shared_processes import SharedProcess, without_program
from sglang import launch_server
from sglang.srt.constrained import compile_process
from sglang.srt.distributed.rendezvous import Rendezvous
from sglang.srt.entrypoints import engine_processes, http_server
from sglang.srt.environ import envs
from sglang.srt.managers.detokenizer import detokenizer_manager
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.models import registry
from sglang.srt.process import run
from sglang.test.test_utils import RunningServer, await_health, new_log_path, server_flags, tail_of

PRELOADED: Final = (
    http_server, engine_processes, detokenizer_manager, run, registry, xgrammar, compile_process
)  # fmt: skip
"""Modules that the processes of a server import."""

InRank = Callable[[int], None]
"""Runs in the process of each rank, before anything is built; gets the rank. It must be at the top
of a module, because it is sent to another process."""


class ForkedProcess(RunningServer):
    """A process that runs `launch_server` with `argv`; its output is in `log_path`.

    Args:
        namespace: Path of the network namespace that it runs in; None: this process's.
    """

    def __init__(
        self,
        argv: list[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        in_rank: InRank | None = None,
        namespace: str | None = None,
    ) -> None:
        multiprocessing.set_forkserver_preload(["rigs.servers.forked_servers"])
        self.log_path = log_path
        self._process = SharedProcess(
            target=_serve, args=(argv, str(log_path), dict(env or {}), in_rank, namespace)
        )
        with without_program():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("launch_server", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def log_tail(self, lines: int = 30) -> str:
        return tail_of(self.log_path, lines)


class ForkedServer(EngineServer):
    """`EngineServer` whose processes are forked.

    Args:
        args, env, model: See `EngineServer`.
        in_rank: Called in each rank first.
        host: Address to listen on, of the machine or of `namespace`.
        namespace: See `ForkedProcess`.
    """

    def __init__(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        model: str | None = None,
        in_rank: InRank | None = None,
        host: str = "127.0.0.1",
        namespace: str | None = None,
    ) -> None:
        super().__init__(*args, env=env, model=model, host=host)
        self._in_rank = in_rank
        self._namespace = namespace

    def launch(self) -> ForkedProcess:
        """Start the process, without waiting for it."""
        flags = server_flags(self._model, self.url, self._args)
        log = new_log_path()
        return ForkedProcess(flags, log, self._env, self._in_rank, self._namespace)

    def start(self, timeout: float = 60.0) -> None:
        self._process = self.launch()
        await_health(self._process, self.url, timeout)


@contextlib.contextmanager
def forking_engines() -> Iterator[None]:
    """Context in which the processes of an `Engine` are forked from one that has imported all."""
    forking = mock.Mock(return_value=_ForkServer())
    # An engine starts its processes with signals blocked. The fork server would begin there, and
    # later servers that come from it would never see a signal.
    forkserver.ensure_running()
    with (
        mock.patch.object(multiprocessing, "get_context", forking),
        without_program(),
    ):
        yield


def _serve(
    argv: list[str],
    log_path: str,
    env: Mapping[str, str],
    in_rank: InRank | None,
    namespace: str | None,
) -> None:
    if namespace is not None:
        enter(namespace)
    gc.freeze()  # A collection would visit imported modules, and copy the shared pages.
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    # One thread for each process: with more processes than cores, threads would wait for each
    # other.
    torch.set_num_threads(1)
    fields = envs.fields()
    with contextlib.ExitStack() as stack:
        for name, value in env.items():
            if name in fields:
                stack.enter_context(fields[name].override(fields[name].parse(value)))
            else:
                os.environ[name] = value  # noqa: TID251
        tempfile.tempdir = None  # Another `TMPDIR` counts, too.
        forking = mock.Mock(return_value=_Forking(in_rank))
        stack.enter_context(mock.patch.object(multiprocessing, "get_context", forking))
        raise SystemExit(launch_server.main(argv))


class _Forking:
    """Replaces `multiprocessing`'s context for `spawn`."""

    def __init__(self, in_rank: InRank | None) -> None:
        self._context = multiprocessing.get_context("fork")
        self._in_rank = in_rank

    def Pipe(self, duplex: bool = True) -> Any:
        return self._context.Pipe(duplex)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> ForkProcess:
        return self._context.Process(
            target=_run_child, args=(target, args, self._in_rank), name=name
        )


class _ForkServer:
    """Replaces `multiprocessing`'s context for `spawn`: children have the present environment."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload(["rigs.servers.forked_servers"])

    def Pipe(self, duplex: bool = True) -> Any:
        return multiprocessing.Pipe(duplex)

    def Process(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str
    ) -> SharedProcess:
        env = dict(os.environ)  # noqa: TID251
        return SharedProcess(target=_run_with, args=(env, target, args), name=name)


def _run_with(env: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()
    os.environ.clear()  # noqa: TID251
    os.environ.update(env)  # noqa: TID251
    torch.set_num_threads(1)
    engine: Any = multiprocessing.parent_process()
    threading.Thread(target=_end_with, args=(engine,), daemon=True).start()
    # The engine's processes look whether their parent is still the one that they began with.
    engine._pid = os.getppid()
    _fork_compile_processes()
    _allow_pauses()
    target(*args)


def _end_with(process: Any) -> None:
    process.join()
    os._exit(1)


def _run_child(target: Callable[..., None], args: tuple[Any, ...], in_rank: InRank | None) -> None:
    """Run `target` in a child of a server, without the sockets of other processes."""
    meeting = next((arg for arg in args if isinstance(arg, Rendezvous)), None)
    listener = None if meeting is None else meeting.listener
    _close_listeners(-1 if listener is None else listener.fileno())
    if meeting is not None:
        _share_a_core()
    _fork_compile_processes()
    _allow_pauses()
    if in_rank is not None and target.__name__ == "_run_scheduler":
        in_rank(0 if meeting is None else meeting.rank)
    target(*args)


def _allow_pauses() -> None:
    """A machine that stands still does not make L3 silent."""
    mock.patch.object(store_calls, "_SILENT_AFTER_S", 60.0).start()


def _share_a_core() -> None:
    """Let the ranks of a server take turns on one core, where one that wakes interrupts no other.

    Tiny ranks mostly wait for each other. Waking one on another core takes longer, and a thread of
    gloo spins while another that was interrupted has its lock.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getppid() % len(cores)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _ForkedCompiler:
    """Replaces `subprocess.Popen` of a compile process, which would import for five CPU seconds.

    It is a child of the fork server that this process comes from, and ends with its pipe.
    """

    def __init__(self, _command: Sequence[str], *, pass_fds: Sequence[int], **_: int) -> None:
        with Connection(os.dup(pass_fds[0])) as engine:
            self._process = SharedProcess(target=_compile, args=(engine,))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def kill(self) -> None:
        self._process.kill()


def _fork_compile_processes() -> None:
    """Fork the compile processes of this process, which itself comes from a fork server."""
    server: Any = forkserver._forkserver
    # Python would start another server. The one that has been inherited runs as long as this does.
    server.ensure_running = resource_tracker.ensure_running
    forking = SimpleNamespace(Popen=_ForkedCompiler, DEVNULL=subprocess.DEVNULL)
    mock.patch.object(compile_process, "subprocess", forking).start()


def spawn_compile_processes(_rank: int) -> None:
    """An `InRank`: compile processes are started as users' are."""
    mock.patch.object(compile_process, "subprocess", subprocess).start()


def _compile(engine: Connection) -> None:
    sys.argv = ["compile_process", str(os.getppid()), str(engine.fileno())]
    compile_process.main()


def _close_listeners(kept: int) -> None:
    """Close inherited listening sockets, so that connections to a dead rank are refused."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd == kept or not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(fd)

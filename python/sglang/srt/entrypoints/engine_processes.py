"""The child processes of one engine: started together, watched, ended together.

The one thread is `engine-watch`, which waits for the death of a child.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.environ import envs
from sglang.srt.managers.messages.ipc import IpcAddresses
from sglang.srt.managers.messages.ready_message import receive_ready
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import IpcNames
from sglang.srt.utils.process import holding_signals_from_children, set_title

if TYPE_CHECKING:
    from sglang.srt.utils.portable_tokenizer import TokenizerData

logger = logging.getLogger(__name__)

KILL_WAIT: Final = 5.0
"""Seconds for a killed child to disappear."""


class StartError(RuntimeError):
    """The engine cannot start; the message is one line with the cause."""


class EngineProcesses:
    """Scheduler and detokenizer of one engine, and the directory of their sockets."""

    def __init__(self, names: IpcNames) -> None:
        """Prepare for sockets in the directory of `names`, which is removed by `kill`."""
        self.ipc = IpcAddresses.from_names(names)
        self.ready_details: dict[str, Any] = {}
        """What the scheduler said when it was ready."""
        self._names = names
        self._children: dict[str, SpawnProcess] = {}
        self._ending = threading.Event()
        self._lock = threading.Lock()

    def start(self, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> Connection:
        """Start a child that calls `target(*args, ready_pipe)`; gives the pipe's reading end."""
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=target, args=(*args, writer), name=f"sglang-{name}")
        with _spinning_briefly(), _without_a_main_to_import(), holding_signals_from_children():
            child.start()
        writer.close()
        self._children[name] = child
        return reader

    def await_ready(self, name: str, reader: Connection) -> dict[str, Any]:
        """Wait for the child's message, as long as it lives.

        Raises:
            StartError: The child said why it cannot start, or died.
        """
        child = self._children[name]
        while not wait([reader, child.sentinel], timeout=1.0):
            self._raise_if_another_died(name)
        try:
            message = receive_ready(reader)
        except EOFError:
            child.join(KILL_WAIT)
            raise StartError(
                f"the {name} process ended while it started ({_ending_of(child)}); "
                "its log lines above have the cause"
            ) from None
        finally:
            reader.close()
        if message.pop("status") != "ready":
            raise StartError(message["message"])
        return message

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with one line on the cause when the first child dies unexpectedly.

        The thread `engine-watch` calls it, once.
        """

        def run() -> None:
            ended = wait([child.sentinel for child in self._children.values()])
            if self._ending.is_set():
                return
            # The first to die is the cause; the other may follow.
            name, child = next(
                (name, child) for name, child in self._children.items() if child.sentinel in ended
            )
            # The kernel closes the pipe behind the sentinel before it has the exit status.
            child.join(KILL_WAIT)
            what = f"{name} ({_ending_of(child)})"
            on_death(f"the engine died: process {what}; the log lines above have the cause")

        threading.Thread(target=run, name="engine-watch", daemon=True).start()

    def expect_end(self) -> None:
        """Do not report children that end from now on."""
        self._ending.set()

    def wait_for_scheduler(self, timeout: float) -> bool:
        """Whether the scheduler ended by itself, with status 0, within `timeout` seconds."""
        child = self._children["scheduler"]
        child.join(timeout)
        if child.exitcode is None:
            logger.warning("the scheduler did not end within %.0f s; killed", timeout)
        elif child.exitcode != 0:
            logger.error("the scheduler ended badly: %s", _ending_of(child))
        return child.exitcode == 0

    def kill(self) -> None:
        """End every child at once and remove the sockets. Any thread, idempotent."""
        self.expect_end()
        with self._lock:
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            deadline = time.monotonic() + KILL_WAIT
            for child in self._children.values():
                child.join(max(deadline - time.monotonic(), 0.0))
            self._names.remove()

    def _raise_if_another_died(self, name: str) -> None:
        for other, child in self._children.items():
            if other != name and not child.is_alive() and child.exitcode:
                raise StartError(f"the {other} process ended: {_ending_of(child)}")


def launch_subprocesses(
    server_args: ServerArgs, load_tokenizer: Callable[[], TokenizerData | None]
) -> EngineProcesses:
    """Start the engine's processes and wait until they can serve.

    Args:
        server_args: Resolved.
        load_tokenizer: Loads the caller's part of the model while the scheduler loads its own, and
            gives what the detokenizer needs of it. An error in it ends the start.

    Raises:
        StartError: One line with the cause; nothing is left running.
    """
    processes = EngineProcesses(IpcNames.create())
    try:
        scheduler = processes.start("scheduler", _run_scheduler, (server_args, processes.ipc, 0))
        data = load_tokenizer()
        detokenizer = processes.start(
            "detokenizer", _run_detokenizer, (server_args, processes.ipc, data)
        )
        processes.await_ready("detokenizer", detokenizer)
        processes.ready_details = processes.await_ready("scheduler", scheduler)
    except BaseException:
        processes.kill()
        raise
    return processes


def _run_scheduler(*args: Any) -> None:
    set_title("scheduler")
    # Imported in the child alone: the parent can start it before it has torch itself.
    from sglang.srt.managers.scheduler.process import run_scheduler_process

    run_scheduler_process(*args)


def _run_detokenizer(*args: Any) -> None:
    set_title("detokenizer")
    from sglang.srt.managers.detokenizer.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args)


@contextlib.contextmanager
def _without_a_main_to_import() -> Iterator[None]:
    """Let a program that was read from standard input start children.

    Its `__file__` is `<stdin>`, which `multiprocessing` takes for a path to import. Without
    `__file__` it starts children as it does for `python -c`.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or main.__spec__ is not None or Path(file).is_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _spinning_briefly() -> contextlib.AbstractContextManager[None]:
    """Let idle OpenMP threads of the children sleep soon, unless the environment says otherwise.

    libgomp reads the setting once, when torch is imported.
    """
    spin = envs.GOMP_SPINCOUNT
    if spin.is_set() or envs.OMP_WAIT_POLICY.is_set():
        return contextlib.nullcontext()
    return spin.override(spin.default)


def _ending_of(child: SpawnProcess) -> str:
    """How a dead child ended, in words."""
    code = child.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"pid {child.pid}, killed by {signal.Signals(-code).name}"
    return f"pid {child.pid}, exit status {code}"

"""The child processes of one engine, which start together, are watched, and end together.

Its only thread is `engine-watch`, which waits for the death of a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.checks import meeting_address, ranks_per_node
from sglang.srt.arg_groups.disaggregation import variables_of
from sglang.srt.distributed.rendezvous import Rendezvous, open_rendezvous
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.start_checks import check_start
from sglang.srt.messages.ipc import (
    LOST_A_RANK,
    IpcAddresses,
    make_ipc_directory,
    receive_ready,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.process import (
    ending,
    holding_signals_from_children,
    postponing_signals,
    set_title,
    silent_cause,
    spinning_briefly,
    without_collections,
)

if TYPE_CHECKING:
    from sglang.srt.utils.portable_tokenizer import TokenizerData

logger = logging.getLogger(__name__)

SCHEDULER: Final = "scheduler"
"""Name of the scheduler's process; with several ranks, prefix of their names."""
KILL_WAIT: Final = 5.0
"""Seconds for a killed child to disappear."""


class StartError(RuntimeError):
    """The engine cannot start; the message is one line with the cause."""


class _LostAnotherRank(StartError):
    """A rank ended because another rank ended, which has the cause."""


class EngineProcesses:
    """Scheduler and detokenizer of one engine, and the directory of their sockets."""

    def __init__(self) -> None:
        """Make the directory of the sockets, which `kill` removes."""
        self._directory = make_ipc_directory()
        self.ipc = IpcAddresses(self._directory.path)
        self.ready_details: list[dict[str, Any]] = []
        """Details of the schedulers' ready messages: those of each DP group's first rank."""
        self._children: dict[str, SpawnProcess] = {}
        self._ending = threading.Event()
        self._lock = threading.Lock()

    def start(self, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> Connection:
        """Start a child that calls `target(*args, ready_pipe)`; return the pipe's reading end."""
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=target, args=(*args, writer), name=f"sglang-{name}")
        # A signal that comes before the child is recorded would leave it running.
        with postponing_signals():
            with spinning_briefly(), _without_a_main_to_import(), holding_signals_from_children():
                child.start()
            writer.close()
            self._children[name] = child
        return reader

    def await_ready(self, readers: dict[str, Connection]) -> dict[str, dict[str, Any]]:
        """Wait for the ready messages of children, while all of them live; return them by name.
        Closes the pipes, `readers` by the child's name. Raises StartError if a child could not
        start, or died without a message."""
        messages: dict[str, dict[str, Any]] = {}
        waiting: dict[Any, str] = {reader: name for name, reader in readers.items()}
        victim: StartError | None = None
        while waiting:
            ready = wait(list(waiting), timeout=None if victim is None else KILL_WAIT)
            if not ready:
                break
            for one in ready:
                name = waiting.pop(one)
                try:
                    messages[name] = self._receive(name, readers[name])
                except _LostAnotherRank as error:
                    # Another rank will report the cause, or has died without a message.
                    victim = error
        if victim is not None:
            raise victim
        return messages

    def _receive(self, name: str, reader: Connection) -> dict[str, Any]:
        try:
            message = receive_ready(reader)
        except EOFError:
            child = self._children[name]
            child.join(KILL_WAIT)
            kind = _LostAnotherRank if child.exitcode == LOST_A_RANK else StartError
            raise kind(
                f"the {name} process ended while it started ({_ending_of(child)}); "
                f"{_cause_of(child)}"
            ) from None
        finally:
            reader.close()
        if message.pop("status") != "ready":
            raise StartError(message["message"])
        return message

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with one line on the cause when the first child dies unexpectedly. The
        thread `engine-watch` calls it, once."""

        def run() -> None:
            ended = wait([child.sentinel for child in self._children.values()])
            if self._ending.is_set():
                return
            # The first child to die has the cause; the others may follow.
            dead = {
                name: child for name, child in self._children.items() if child.sentinel in ended
            }
            for child in dead.values():
                # The kernel closes the pipe behind the sentinel before it has the exit status.
                child.join(KILL_WAIT)
            name = next((n for n, c in dead.items() if c.exitcode != LOST_A_RANK), next(iter(dead)))
            what = f"{name} ({_ending_of(dead[name])})"
            on_death(f"the engine died: process {what}; {_cause_of(dead[name])}")

        threading.Thread(target=run, name="engine-watch", daemon=True).start()

    def expect_end(self) -> None:
        """Stop reporting children that end."""
        self._ending.set()

    def wait_for_scheduler(self, timeout: float | None) -> bool:
        """Wait until the schedulers of this machine end; return whether they did so by themselves,
        with status 0, within `timeout` seconds. None: no time limit."""
        schedulers = {
            name: child for name, child in self._children.items() if name.startswith(SCHEDULER)
        }
        deadline = None if timeout is None else time.monotonic() + timeout
        for name, child in schedulers.items():
            child.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if child.exitcode is None:
                logger.warning("the %s did not end within %.0f s; killed", name, timeout)
            elif child.exitcode != 0:
                logger.error("the %s failed: %s; %s", name, _ending_of(child), _cause_of(child))
        return all(child.exitcode == 0 for child in schedulers.values())

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
            self._directory.remove()


def run_node(args: ServerArgs) -> int:
    """Run the ranks of a machine that is not the first of its server, until rank 0 ends them;
    return the process's exit status. Raises as `launch_subprocesses`."""
    args = with_local_model(args)
    check_start(args)
    processes = launch_subprocesses(args)
    try:
        count = ranks_per_node(args)
        first = args.node_rank * count
        which = (
            f"rank {first} serves" if count == 1 else f"ranks {first} to {first + count - 1} serve"
        )
        logger.info("%s; rank 0 ends the server", which)
        return 0 if processes.wait_for_scheduler(None) else 1
    finally:
        processes.kill()


def launch_subprocesses(
    server_args: ServerArgs, load_tokenizer: Callable[[], TokenizerData | None] | None = None
) -> EngineProcesses:
    """Start this machine's processes and wait until they can serve. `server_args` are resolved.

    `load_tokenizer` loads the caller's part of the model while the schedulers load their own, and
    returns the data that the detokenizer needs. An error in it ends the start. None: the machine is
    not the first of its server, and runs only ranks.

    Raises:
        StartError, ValueError: One line with the cause; no process is left running.
    """
    processes = EngineProcesses()
    try:
        readers = _start_schedulers(processes, server_args)
        firsts = list(readers)[:: server_args.tp_size // server_args.attn_dp_size]
        if load_tokenizer is not None:
            data = load_tokenizer()
            without_secret = dataclasses.replace(server_args, disaggregation_secret=None)
            readers["detokenizer"] = processes.start(
                "detokenizer", _run_detokenizer, (without_secret, processes.ipc, data)
            )
        messages = processes.await_ready(readers)
        processes.ready_details = [messages[first] for first in firsts]
    except BaseException:
        processes.kill()
        raise
    return processes


def _start_schedulers(processes: EngineProcesses, server_args: ServerArgs) -> dict[str, Connection]:
    """Start this machine's ranks; return the pipe of each by its name, the first rank's first.
    Raises ValueError if this machine cannot listen at `--dist-init-addr`."""
    with variables_of(server_args):
        return _start_ranks(processes, server_args)


def _start_ranks(processes: EngineProcesses, server_args: ServerArgs) -> dict[str, Connection]:
    ipc = processes.ipc
    if server_args.tp_size == 1:
        alone = (server_args, ipc, SCHEDULER, None)
        return {SCHEDULER: processes.start(SCHEDULER, _run_scheduler, alone)}
    count = ranks_per_node(server_args)
    first = server_args.node_rank * count
    readers = {}
    host, port = meeting_address(server_args)
    in_group = server_args.tp_size // server_args.attn_dp_size
    with open_rendezvous(server_args.tp_size, host, port, first_rank=first) as meeting:
        for rank in range(first, first + count):
            group = "" if server_args.attn_dp_size == 1 else f"_DP{rank // in_group}"
            name = f"{SCHEDULER}{group}_TP{rank}"
            args = (server_args, ipc, name, meeting.for_rank(rank))
            readers[name] = processes.start(name, _run_scheduler, args)
    return readers


def _run_scheduler(
    server_args: ServerArgs,
    ipc: IpcAddresses,
    name: str,
    rendezvous: Rendezvous | None,
    pipe: Connection,
) -> None:
    set_title(name)
    # Imported only in the child, so that the parent can start it before it imports torch itself.
    with without_collections():
        from sglang.srt.process.run import run_scheduler_process

    run_scheduler_process(server_args, ipc, rendezvous, pipe)


def _run_detokenizer(*args: Any) -> None:
    set_title("detokenizer")
    from sglang.srt.managers.detokenizer.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args)


@contextlib.contextmanager
def _without_a_main_to_import() -> Iterator[None]:
    """Context in which a program that was read from standard input can start children.

    Its `__file__` is `<stdin>`, which `multiprocessing` would import as a path. Without `__file__`
    children start as for `python -c`.
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


def _ending_of(child: SpawnProcess) -> str:
    return f"pid {child.pid}, {ending(child.exitcode)}"


def _cause_of(child: SpawnProcess) -> str:
    """The likely cause of a child's end, or the place that tells it."""
    return silent_cause(child.exitcode) or "the log lines above have the cause"

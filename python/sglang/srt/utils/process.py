"""Processes: titles, signals, limits, memory, ending them by their handles or with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

import psutil

from sglang.srt.environ import envs, move_variables
from sglang.srt.utils.network import wait_until

logger = logging.getLogger(__name__)

MAX_OPEN_FILES: Final = 65536
"""More than the connections of a model server, and few enough for tables with a row for each."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and reclaimable file cache of a control group: version 2, version 1."""
_ARGUMENTS: Final = slice(45, 49)
"""Begin and end of the arguments and of the environment, in /proc/self/stat behind the name
(proc_pid_stat(5))."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_LIBC: Final = ctypes.CDLL(None)
_GROUP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that a whole process group may get, for example by Ctrl-C; its leader handles them."""


def set_title(role: str, details: str = "") -> None:
    """Set the title that `ps` and `top` show for this process: `sglang::role details`."""
    title = f"sglang::{role} {details}".rstrip().encode()
    _LIBC.prctl(_PR_SET_NAME, title)  # The kernel keeps 15 bytes.
    # `ps` reads the arguments in the process's memory. Python has a copy of its own.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, variables, last = map(int, fields[_ARGUMENTS])
    room = end - begin
    if len(title) >= room and variables == end:
        # Where the arguments do not end with 0, `ps` reads on in the environment.
        move_variables()
        room = min(len(title) + 1, last - begin)
    if room > 0:
        ctypes.memmove(begin, title[: room - 1].ljust(room, b"\0"), room)


def spin_briefly() -> None:
    """Make idle OpenMP threads of this process sleep soon, unless the environment has a setting.

    libgomp reads the setting once, when torch is imported: call this before.
    """
    if not envs.OMP_WAIT_POLICY.is_set():
        envs.GOMP_SPINCOUNT.export_default()


@contextlib.contextmanager
def spinning_briefly() -> Iterator[None]:
    """Context in which children that start are told to `spin_briefly`; this process is not."""
    was_set = envs.GOMP_SPINCOUNT.is_set()
    spin_briefly()
    try:
        yield
    finally:
        if not was_set:
            envs.GOMP_SPINCOUNT.clear()


@contextlib.contextmanager
def holding_signals_from_children() -> Iterator[None]:
    """Block SIGINT and SIGTERM in children that this thread starts inside the block.

    A child unblocks them when it calls `leave_signals_to_parent`, after its imports.
    """
    # The tracker would start with the first child of `multiprocessing` and reset the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def postponing_signals() -> Iterator[None]:
    """Postpone SIGINT and SIGTERM to the end of the block. Outside the main thread it does nothing,
    because no handler runs there.

    For imports: if a handler raises inside an import that C++ code makes, the process aborts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {one: signal.signal(one, lambda sig, _: came.append(sig)) for one in _GROUP_SIGNALS}
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        for sig in came:
            signal.raise_signal(sig)


def ending(status: int | None) -> str:
    """How a process ended, by its exit status as Python has it: negative for a signal."""
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def silent_cause(status: int | None) -> str | None:
    """The likely cause of an end that leaves no line in the log, and the remedy; None: it is not
    such an end. For processes that this one has not killed itself."""
    if status != -signal.SIGKILL:
        return None
    return (
        "killed, probably by the kernel's OOM killer, for want of memory (`dmesg` "
        "tells): lower --mem-fraction-static or --max-total-tokens for L1, "
        "--hicache-size for L2"
    )


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, because the parent ends this process. Main thread only."""
    for one in _GROUP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def stop_process(process: subprocess.Popen[bytes], timeout: float = 10.0) -> int:
    """Send SIGTERM, wait up to `timeout` seconds, then send SIGKILL. Returns the exit status.
    Idempotent."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("process %d ignored SIGTERM for %.0f s; killed", process.pid, timeout)
            process.kill()
    return process.wait()


def kill_process_tree(pid: int, include_parent: bool = True, timeout: float = 10.0) -> None:
    """Send SIGKILL to `pid` and all its descendants, and wait until they have ended.

    Args:
        pid: The root of the tree. It must not be reaped yet, because ids are reused. If it does
            not exist, nothing happens.
        timeout: Seconds to wait for the end; a zombie has ended.
    """
    try:
        root = psutil.Process(pid)
        victims = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if include_parent:
        # First, so that it cannot start more children.
        victims.insert(0, root)
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    # Polls without reaping, because a `Popen` of the caller needs the exit status.
    if not wait_until(lambda: not any(map(is_alive, victims)), timeout, interval=0.01):
        left = [victim.pid for victim in victims if is_alive(victim)]
        logger.warning("processes %s outlived SIGKILL by %.0f s", left, timeout)


def is_alive(process: psutil.Process) -> bool:
    """True if `process` still runs. A zombie does not; it only waits to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process, a fork of `parent`, when the forking thread ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, at most to `MAX_OPEN_FILES`.

    Holds for this process and its children. Each connection is a file, and shells start programs
    with a limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection while many objects are made of which few are garbage.

    Collections take ten times as long as decoding a body of hundreds of thousands of lists, which a
    hostile client sends, and hold up the event loop. They are a tenth of the time of imports.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_heap() -> None:
    """Exclude all existing objects from garbage collections. Call it once, after loading.

    Libraries, tokenizer and model are a quarter of a million objects. A full collection visits all
    of them: measured, it stopped the server for 0.15 s every 1,500 requests.
    """
    gc.collect()
    gc.freeze()


def start_parent_watch(
    parent_pid: int, on_death: Callable[[], None], interval: float = 0.5
) -> None:
    """Call `on_death` once, from a daemon thread, when the parent is no longer `parent_pid`.

    The kernel's signal for this (PR_SET_PDEATHSIG) fires when the parent's *thread* ends, which
    is wrong for an engine that was started from a worker thread.

    Args:
        parent_pid: `os.getpid()` of the parent, passed to the child at its start, so that the
            death of a parent before this call is noticed too.
        on_death: Must not block for long; usually kills this process.
        interval: Seconds between two checks.
    """
    wake = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            wake.wait(interval)
        on_death()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def host_memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Bytes that this process may still take without swapping, and bytes that there are: those of
    the machine, or of this process's control group if it has fewer."""
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    for limit_file, use_file, cache in _CGROUP_FILES:
        try:
            limit = int((cgroup / limit_file).read_text())
            used = int((cgroup / use_file).read_text())
            stat = (cgroup / use_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # The text of no limit is "max".
            continue
        words = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
        left = max(0, limit - used + int(words.get(cache, "0")))
        return min(available, left), min(total, limit)
    return available, total


QUIET_SECONDS: Final = 2.0
"""Delay between the first large use and the return, so that simultaneous uses share one return."""


def trim_heap() -> None:
    """Return freed memory now. Does nothing without glibc. Any thread; releases the interpreter
    lock."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Returns freed memory in a worker thread, some time after its use. Event loop thread only.

    glibc reuses freed memory for later allocations and returns only the top of its heap. Without
    this a server would stay large after one huge request.
    """

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._is_due = False

    def trim_soon(self) -> None:
        """Return memory soon, because a large object exists now and will be freed."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._quiet_seconds, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim_heap)

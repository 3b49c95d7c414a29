"""Processes: titles, signals and limits, ending them by their handles and with one's parent."""

from __future__ import annotations

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
from typing import Final

import psutil
from setproctitle import setproctitle

from sglang.srt.utils.network import wait_until

logger = logging.getLogger(__name__)

MAX_OPEN_FILES: Final = 65536
"""More connections than a server of models has, and few enough for tables that have a row each."""

_FROM_THE_KEYBOARD: Final = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that a whole process group gets, and its leader has to act upon."""


def set_title(role: str, details: str = "") -> None:
    """What `ps` and `top` show in place of this process's command line: `sglang::role details`."""
    setproctitle(f"sglang::{role} {details}".rstrip())


@contextlib.contextmanager
def holding_signals_from_children() -> Iterator[None]:
    """Children that this thread starts inside get no SIGINT and no SIGTERM until they call
    `leave_signals_to_parent`, however long their imports take before that.
    """
    # It would be started with the first child of `multiprocessing`, and take the mask away.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_THE_KEYBOARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM from now on: the parent ends this process. Main thread."""
    for one in _FROM_THE_KEYBOARD:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_THE_KEYBOARD)


def stop_process(process: subprocess.Popen[bytes], timeout: float = 10.0) -> int:
    """SIGTERM, up to `timeout` seconds to leave, then SIGKILL.

    Returns:
        The exit status. Idempotent: a process that has ended is left as it is.
    """
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("process %d ignored SIGTERM for %.0f s; killed", process.pid, timeout)
            process.kill()
    return process.wait()


def kill_process_tree(pid: int, include_parent: bool = True, timeout: float = 10.0) -> None:
    """SIGKILL `pid` and everything below it, and wait until they are gone.

    Args:
        pid: The root of the tree, not reaped yet (a freed id may belong to someone else by now).
            A process that does not exist is fine.
        include_parent: Whether the root goes too; False kills the caller's own children.
        timeout: Seconds to wait for the killed to disappear; zombies count as gone.
    """
    try:
        root = psutil.Process(pid)
        victims = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if include_parent:
        # First, so that it cannot start another child.
        victims.insert(0, root)
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    # Looks only: reaping the caller's children would cost their `Popen` the exit status.
    if not wait_until(lambda: not any(map(is_alive, victims)), timeout, interval=0.01):
        left = [victim.pid for victim in victims if is_alive(victim)]
        logger.warning("processes %s outlived SIGKILL by %.0f s", left, timeout)


def is_alive(process: psutil.Process) -> bool:
    """Whether `process` still runs; a zombie, which only waits to be reaped, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, a fork of `parent`, when the forking thread ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def raise_file_limit() -> None:
    """Let this process, and the children that it starts, open as many files as the machine's
    administrator allows, up to `MAX_OPEN_FILES`: each connection is one, and shells start programs
    with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle_heap() -> None:
    """Let garbage collections pass over everything that exists now. For a process that serves,
    once it has loaded what it keeps for its life.

    Libraries, tokenizer and model are a quarter of a million objects. A full collection goes
    through all of them: measured 0.15 s in which nothing is served, every 1,500 requests.
    """
    gc.collect()
    gc.freeze()


def start_parent_watch(
    parent_pid: int, on_death: Callable[[], None], interval: float = 0.5
) -> threading.Thread:
    """Call `on_death` once, from a daemon thread, when `parent_pid` is our parent no more.

    The kernel's own signal for this (PR_SET_PDEATHSIG) fires when the parent's *thread* ends,
    which is wrong for an engine that was started from a worker thread.

    Args:
        parent_pid: What `os.getpid()` was in the parent, handed over at the start, so that a
            parent that died before this call is noticed too.
        on_death: Must not block for long; usually kills the own process.
        interval: Seconds between looks.
    """
    wake = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            wake.wait(interval)
        on_death()

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread

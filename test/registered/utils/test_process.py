"""Ending processes by handle, as trees and with the parent; limits and heap."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import psutil
import pytest

from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import (
    freeze_heap,
    host_memory,
    is_alive,
    kill_process_tree,
    postponing_signals,
    silent_cause,
    start_parent_watch,
    stop_process,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

TREE = "sleep 300 & setsid sleep 300 & echo ready; wait"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


def start(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_killing_a_tree_includes_children_in_other_sessions() -> None:
    process = start(TREE)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    kill_process_tree(process.pid)
    assert process.wait(30) == -signal.SIGKILL  # the status was left for the handle
    assert not any(is_alive(child) for child in children)


def test_only_the_children_are_killed() -> None:
    process = start(TREE)
    kill_process_tree(process.pid, include_parent=False)
    assert process.wait(30) == 0  # `wait` in the script returned


def test_killing_an_ended_process_does_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    kill_process_tree(process.pid)
    assert stop_process(process) == 0


def test_stop_sends_sigterm_first_then_sigkill() -> None:
    assert stop_process(start("echo ready; sleep 300"), timeout=30) == -signal.SIGTERM
    assert stop_process(start(STUBBORN), timeout=0.2) == -signal.SIGKILL


def test_parent_watch_fires_if_the_parent_had_already_ended() -> None:
    fired = threading.Event()
    start_parent_watch(parent_pid=-1, on_death=fired.set)
    assert fired.wait(30)


def test_a_child_notices_the_death_of_its_parent(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    child = (
        "import os, sys, threading\n"
        "from sglang.srt.utils.process import start_parent_watch\n"
        "start_parent_watch(int(sys.argv[1]), lambda: os._exit(0), interval=0.05)\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "threading.Event().wait(60)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    assert wait_until(lambda: mark.exists() and mark.read_text() != "", 20)
    orphan = psutil.Process(int(mark.read_text()))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not is_alive(orphan), 30)


class Link:
    """Part of a reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_a_settled_heap_has_no_garbage_and_is_not_collected() -> None:
    kept, garbage = Link(), Link()
    lost = weakref.ref(garbage)
    del garbage
    try:
        freeze_heap()
        assert lost() is None
        assert all(one is not kept for one in gc.get_objects())
        later = Link()
        assert any(one is later for one in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_inside_the_block_is_handled_behind_it(sig: signal.Signals, fails: bool) -> None:
    def unwind(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(sig, unwind)
    went_on: list[bool] = []

    def be_told_inside() -> None:
        with postponing_signals():
            signal.raise_signal(sig)
            went_on.append(True)
            if fails:
                raise ValueError("an import failed as well")

    try:
        with pytest.raises(SystemExit) as ended:
            be_told_inside()
        assert ended.value.code == 128 + sig and went_on
        assert signal.getsignal(sig) is unwind
    finally:
        signal.signal(sig, before)


def test_outside_the_main_thread_signals_stay_with_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def run() -> None:
        with postponing_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 200, 200), (64, 100_000, 65536)])
def test_the_limit_of_open_files_rises_to_the_hard_limit(soft: int, hard: int, then: int) -> None:
    of_machine = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = min(hard, of_machine)
    script = (
        "import resource as r; from sglang.srt.utils.process import raise_file_limit\n"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); raise_file_limit()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.split() == [str(min(then, hard)), str(hard)], said.stderr


def test_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    """A container may have less than its machine."""
    machine = host_memory(tmp_path)
    assert machine[1] == psutil.virtual_memory().total
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path)[1] == machine[1]
    (tmp_path / "memory.max").write_text("5000000\n")
    assert host_memory(tmp_path) == (3_000_000, 5_000_000)


def test_only_sigkill_leaves_no_line_in_a_log() -> None:
    cause = silent_cause(-signal.SIGKILL)
    assert cause is not None
    assert "the kernel's OOM killer" in cause and "lower --mem-fraction-static" in cause
    assert silent_cause(-signal.SIGSEGV) is silent_cause(1) is silent_cause(None) is None

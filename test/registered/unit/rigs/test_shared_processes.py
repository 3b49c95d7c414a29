"""Processes that several threads start and poll; they do not import the test file again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from types import ModuleType

import pytest

from rigs.shared_processes import SharedProcess, without_program
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")


def test_modules_that_another_thread_imports_while_a_process_starts_stay() -> None:
    program, imported = sys.modules["__main__"], ModuleType("imported_meanwhile")
    with without_program():
        assert not hasattr(sys.modules["__main__"], "__file__")
        sys.modules[imported.__name__] = imported
    assert sys.modules["__main__"] is program
    assert sys.modules.pop(imported.__name__) is imported


def test_the_last_of_two_that_start_processes_brings_the_program_back() -> None:
    program, other = sys.modules["__main__"], without_program()
    with without_program():
        other.__enter__()
    assert not hasattr(sys.modules["__main__"], "__file__"), "the other one is still starting"
    other.__exit__(None, None, None)
    assert sys.modules["__main__"] is program


@pytest.mark.parametrize("end", [SharedProcess.join, lambda process: process.exitcode])
def test_two_threads_that_read_an_end_get_the_same_status(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[SharedProcess], object]
) -> None:
    process = SharedProcess(target=os._exit, args=(3,))
    with without_program():
        process.start()
    read, others = forkserver.read_signed, list[threading.Thread]()

    def slow(fd: int) -> int:
        """While one thread has not read the status yet, another one looks."""
        if not others:
            others.append(threading.Thread(target=end, args=(process,)))
            others[0].start()
            others[0].join(0.2)
        return int(read(fd))

    monkeypatch.setattr(forkserver, "read_signed", slow)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(process.join).result(60)
    others[0].join(60)
    assert process.exitcode == 3

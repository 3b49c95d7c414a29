"""Threads beside the model's use one core; the model's OpenMP team stays unchanged."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from rigs.servers.scarce_threads import NO_THREAD, no_threads
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.utils.threads import leave_cores_to_model, lower_priority, started_pool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_the_limit_holds_for_the_calling_thread_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # also on a machine of one core
    try:
        seen: list[int] = []

        def work() -> None:
            leave_cores_to_model()
            torch.ones(1 << 20).add_(1)
            seen.append(torch.get_num_threads())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [*seen, torch.get_num_threads()] == [1, 2, 2]
    finally:
        torch.set_num_threads(before)


def test_copies_on_a_cpu_use_one_thread() -> None:
    stream = device_runtime("cpu").make_copy_stream("copies")
    seen: list[int] = []
    stream.submit(lambda: seen.append(torch.get_num_threads()))
    stream.close()
    assert seen == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_lower_priority_holds_for_the_calling_thread_only() -> None:
    seen: list[int] = []

    def work() -> None:
        lower_priority()
        lower_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [max(10, before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_started_pool_starts_no_thread_for_its_work() -> None:
    pool = started_pool(3, "started")
    everywhere = threading.Barrier(3)
    with no_threads("started"):
        waits = [pool.submit(everywhere.wait, 30) for _ in range(3)]
        assert sorted(wait.result(30) for wait in waits) == [0, 1, 2]
    pool.shutdown()


def test_a_pool_that_cannot_start_leaves_no_thread_behind() -> None:
    with no_threads("half", spared=1), pytest.raises(RuntimeError, match=NO_THREAD):
        started_pool(2, "half")
    for thread in threading.enumerate():
        if thread.name.startswith("half"):
            thread.join(30)
            assert not thread.is_alive()

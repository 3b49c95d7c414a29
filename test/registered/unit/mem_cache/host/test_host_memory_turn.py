"""Servers that size L2 by the host's free memory look and take alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang.srt.mem_cache.host.host_memory_turn import host_memory_turn, lock_path
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def waiting(*, alone: bool) -> Iterator[threading.Event]:
    """Another server that wants a turn; the event says that it has it."""
    has_it = threading.Event()

    def take() -> None:
        with host_memory_turn(alone=alone):
            has_it.set()

    thread = threading.Thread(target=take)
    thread.start()
    yield has_it
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.parametrize(("mine", "other"), [(True, True), (True, False), (False, True)])
def test_one_waits_for_the_other(mine: bool, other: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with waiting(alone=other) as has_it:
        pass
    assert has_it.is_set() and not caplog.records
    with host_memory_turn(alone=mine):
        next_one = waiting(alone=other)
        has_it = next_one.__enter__()
        assert wait_until(lambda: "waiting for another server" in caplog.text, 30)
        assert not has_it.is_set()
    next_one.__exit__(None, None, None)
    assert has_it.is_set()


def test_servers_of_fixed_sizes_take_memory_beside_each_other() -> None:
    with host_memory_turn(alone=False), waiting(alone=False) as has_it:
        assert has_it.wait(30)


def test_a_server_that_hangs_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with host_memory_turn(alone=True), host_memory_turn(alone=True, wait_s=0):
        assert "L2 is sized beside it" in caplog.text


def test_a_lock_that_cannot_be_had_costs_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    lock_path().symlink_to(tmp_path / "other")  # Another user may have made it.
    with host_memory_turn(alone=True):
        assert f"cannot lock {lock_path()}" in caplog.text
    assert not (tmp_path / "other").exists()


def test_an_error_ends_the_turn() -> None:
    with pytest.raises(ValueError, match="why"), host_memory_turn(alone=True):
        raise ValueError("why")
    descriptor = os.open(lock_path(), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)

"""Rooms that a decode server declines: all are told, whichever prefill servers are away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sglang.srt.disaggregation import declines
from sglang.srt.disaggregation.common.bootstrap_client import BootstrapError
from sglang.srt.disaggregation.common.bootstrap_route import Route
from sglang.srt.disaggregation.common.conversation import Patience
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.disaggregation.declines import Declines
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.disaggregation.desk_rig import OFFER, SILENT_S, UNWANTED_S, until
from sglang.test.disaggregation.pd_rig import one_rank

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PATIENCE = Patience(bootstrap=10, waiting=10, silence=0.5)
WELL, AWAY = "well", "away"


class Scene:
    """A prefill server's desk, and declines to it and to one that is away."""

    def __init__(self) -> None:
        self.desk = RoomDesk(OFFER, "127.0.0.1", unwanted_s=UNWANTED_S, silent_s=SILENT_S)
        self.may_find = threading.Event()
        self.may_find.set()
        self.look_ups: list[str] = []
        self.declines = Declines(self._find, PATIENCE, None)

    def _find(self, host: str, port: int, rank: int) -> Route:
        self.look_ups.append(host)
        assert self.may_find.wait(10)
        if host == AWAY:
            raise BootstrapError("it cannot be reached")
        return one_rank(f"tcp://127.0.0.1:{self.desk.port}")

    def add(self, room: int, host: str = WELL, port: int = 1) -> None:
        self.declines.add(Bootstrap(host, port, room), f"why {room}")

    def told(self, num_rooms: int) -> dict[int, str]:
        """The reasons of `num_rooms` rooms that the desk heard of."""
        told: dict[int, str] = {}

        def have_come() -> bool:
            told.update(self.desk.take_given_up())
            return len(told) >= num_rooms

        until(have_come)
        return told


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene()
        stack.callback(scene.desk.close)
        stack.callback(scene.declines.close)
        stack.callback(scene.may_find.set)
        yield scene


def test_all_of_many_are_told_over_one_connection(scene: Scene) -> None:
    scene.may_find.clear()
    for room in range(500):
        scene.desk.open(room)
        scene.add(room)
    scene.may_find.set()
    told = scene.told(500)
    assert told[499] == "the decode server gave it up: why 499"
    assert (scene.look_ups, scene.declines.num_dropped) == ([WELL], 0)
    until(lambda: not scene.declines._queues)
    scene.desk.open(500)
    scene.add(500)
    assert list(scene.told(1)) == [500], "its thread had ended"


def test_a_server_that_is_away_holds_up_no_other(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for room in range(100):
        scene.add(room, AWAY)
    scene.desk.open(1)
    scene.add(1)
    assert list(scene.told(1)) == [1]
    until(lambda: scene.declines.num_dropped == 100)
    assert (
        "100 rooms of the prefill server at away:1 could not be declined, 100 in all: the prefill "
        "server is not found: it cannot be reached"
    ) in caplog.messages
    until(lambda: not scene.declines._queues)


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(declines, "MAX_ROOMS", 3)
    monkeypatch.setattr(declines, "MAX_SERVERS", 2)
    scene.may_find.clear()
    for room in range(5):
        scene.desk.open(room)
        scene.add(room)
    assert scene.declines.num_dropped == 2
    scene.add(5, AWAY)
    scene.add(6, WELL, 2)
    assert scene.declines.num_dropped == 3, "a third server"
    line = "1 rooms of the prefill server at well:1 could not be declined, 1 in all: too many wait"
    assert caplog.messages[0] == line
    scene.may_find.set()
    assert sorted(scene.told(3)) == [0, 1, 2]


def test_without_a_thread_they_are_dropped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        scene.add(1)
    assert scene.declines.num_dropped == 1
    scene.desk.open(1)
    scene.add(1)
    assert list(scene.told(1)) == [1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

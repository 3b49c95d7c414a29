"""Readers of rooms: ranks that share one, and decode servers that are gone."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

import pytest

from rigs.disaggregation.desk_rig import (
    SILENT_S,
    TOKEN,
    UNWANTED_S,
    Asker,
    Clock,
    PrefillRooms,
    failure,
    fill,
    until,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import room_server, shard_read
from sglang.srt.disaggregation.common.room_server import LONG_POLL_S
from sglang.srt.disaggregation.control.protocol import (
    GiveUp,
    Hello,
    Poll,
    Received,
    Released,
    RoomStatus,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


# ---- readers of several ranks ------------------------------------------------------------------


def test_a_room_is_read_when_all_parts_of_its_reader_have_it(
    prefill: PrefillRooms, new_asker: Callable[[], Asker], clock: Clock
) -> None:
    fill(prefill, 1)
    askers = [new_asker() for _ in range(3)]
    for part, one in enumerate(askers):
        news = one.ask(Poll(1, "me", 0, may_wait=False, part=part, num_parts=3))
        assert news == RoomStatus(1, True, 0, [3, 4], TOKEN)
    assert prefill.take_claimed() == [1], "they are one reader"
    for part, one in enumerate(askers):
        assert prefill.outcome(1) is None
        for _ in range(2):
            assert one.ask(Received(1, "me", part)) == Released(1, was_held=True)
    assert prefill.outcome(1) == ""


def test_a_part_that_is_silent_is_missed(prefill: PrefillRooms, asker: Asker, clock: Clock) -> None:
    """A part that has never asked, while the others go on, is missed too."""
    fill(prefill, 1)
    for _ in range(3):
        asker.ask(Poll(1, "me", 0, may_wait=False, part=0, num_parts=2))
        assert prefill.outcome(1) is None
        clock.now += SILENT_S / 2
    assert prefill.outcome(1) == f"the decode server has not been heard of for {SILENT_S} s"


def test_a_part_that_has_all_need_not_be_heard_of(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    fill(prefill, 1)
    asker.ask(Poll(1, "me", 0, may_wait=False, part=0, num_parts=2))
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True)
    clock.now += SILENT_S - 1
    asker.ask(Poll(1, "me", 0, may_wait=False, part=1, num_parts=2))
    clock.now += SILENT_S - 1
    assert prefill.outcome(1) is None


def test_a_part_gives_up_for_all(prefill: PrefillRooms, asker: Asker) -> None:
    fill(prefill, 1)
    asker.ask(Poll(1, "me", 0, may_wait=False, part=0, num_parts=2))
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True)
    assert asker.ask(GiveUp(1, "me", "because")) == Released(1, was_held=False)
    assert prefill.take_given_up() == {1: "the decode server gave it up: because"}
    assert asker.ask(Received(1, "me", 1)) == Released(1, was_held=False)
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True), "it was, until then"


def test_a_part_that_there_is_not_has_read_nothing(prefill: PrefillRooms, asker: Asker) -> None:
    fill(prefill, 1)
    asker.ask(Poll(1, "me", 0, may_wait=False, part=0, num_parts=1))
    assert asker.ask(Received(1, "me", 5)) == Released(1, was_held=False)
    assert prefill.outcome(1) is None


# ---- decode servers that do not want it, or are gone -------------------------------------------


def test_a_room_is_given_up_once(prefill: PrefillRooms, asker: Asker) -> None:
    prefill.open(1)
    asker.look(1)
    for reason in ("aborted" * 200, "second"):
        assert asker.ask(GiveUp(1, "me", reason)) == Released(1, was_held=False)
    given_up = prefill.take_given_up()
    assert given_up == {1: "the decode server gave it up: " + ("aborted" * 200)[:500]}
    assert prefill.take_given_up() == {}
    assert prefill.outcome(1) == given_up[1]
    assert asker.look(1).failure == given_up[1]


def test_a_room_that_has_ended_is_not_given_up(prefill: PrefillRooms, asker: Asker) -> None:
    fill(prefill, 1)
    asker.look(1)
    asker.ask(Received(1, "me"))
    asker.ask(GiveUp(1, "me", "late"))
    assert (prefill.outcome(1), prefill.take_given_up()) == ("", {})
    fill(prefill, 2)
    asker.ask(GiveUp(2, "me", "in time"))
    prefill.end(2, "before anybody has looked")
    assert prefill.take_given_up() == {}


def test_a_room_may_be_given_up_before_its_request_comes(
    prefill: PrefillRooms, asker: Asker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_server, "_MAX_UNWANTED", 2)
    for room in (1, 2, 1, 3):
        asker.ask(GiveUp(room, "me", f"of {room}"))
    for room in (1, 2, 3):
        prefill.open(room)
    assert prefill.take_given_up() == {
        room: f"the decode server gave it up: of {room}" for room in (1, 3)
    }, "the oldest was forgotten"
    asker.ask(GiveUp(4, "me", "of 4"))
    clock.now += UNWANTED_S + 1
    until(lambda: not prefill._unwanted)
    prefill.open(4)
    assert prefill.take_given_up() == {}, "as late a request is another"


def test_a_room_is_claimed_by_the_first_that_asks_for_it(
    prefill: PrefillRooms, asker: Asker
) -> None:
    for room in (1, 2, 3):
        prefill.open(room)
    asker.ask(Hello())
    asker.ask(Received(2, "me"))
    asker.ask(GiveUp(3, "me", "because"))
    assert prefill.take_claimed() == []
    asker.look(1)
    asker.look(1, "another")
    asker.look(4)
    assert prefill.take_claimed() == [1]
    assert prefill.take_claimed() == []


def test_a_reader_that_is_not_heard_of_is_gone(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    fill(prefill, 1)
    asker.look(1)
    clock.now += SILENT_S
    assert prefill.outcome(1) is None
    asker.look(1, "somebody else")
    clock.now += 1
    assert prefill.outcome(1) == f"the decode server has not been heard of for {SILENT_S} s"


def test_a_reader_that_is_gone_is_missed_without_a_question(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    fill(prefill, 1)
    asker.look(1)
    assert prefill.senders[1].poll() == KVPoll.Transferring
    clock.now += SILENT_S + 1
    until(lambda: prefill.senders[1].poll() == KVPoll.Failed)
    assert (
        failure(prefill.senders[1]) == f"the decode server has not been heard of for {SILENT_S} s"
    )


def test_reading_for_long_is_no_silence(prefill: PrefillRooms, asker: Asker, clock: Clock) -> None:
    fill(prefill, 1)
    for _ in range(5):
        clock.now += SILENT_S
        asker.look(1, have=2)
        assert prefill.outcome(1) is None
    asker.send(Poll(1, "me", 2, has_token=True))
    asker.ask(Hello())
    clock.now += LONG_POLL_S
    asker.hear()
    clock.now += SILENT_S
    assert prefill.outcome(1) is None, "it was heard of until its question was answered"


# ---- giving up ---------------------------------------------------------------------------------


def test_who_gives_up_before_it_has_read_an_answer_is_heard(
    prefill: PrefillRooms, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is about to write when the connection ends."""
    monkeypatch.setattr(shard_read, "LINGER_S", 30.0)
    writing, go_on = threading.Event(), threading.Event()
    answer_waiting = prefill._answer_waiting

    def slow() -> None:
        if prefill._rooms[1].pages:
            writing.set()
            assert go_on.wait(60)
        answer_waiting()

    prefill.open(1)
    asker.send(Poll(1, "me", 0))
    asker.look(1)
    asker.send(Poll(1, "me", 0, may_wait=False))
    sock = asker.link._socket
    assert sock is not None
    until(lambda: bool(select.select([sock], [], [], 0)[0]))
    monkeypatch.setattr(prefill, "_answer_waiting", slow)
    prefill.add_pages(1, [5])
    assert writing.wait(60)
    leaves = threading.Thread(target=shard_read.give_up, args=([asker.link], 1, "me", "aborted"))
    leaves.start()
    leaves.join(0.3)
    go_on.set()
    leaves.join(60)
    until(lambda: prefill.outcome(1) == "the decode server gave it up: aborted")

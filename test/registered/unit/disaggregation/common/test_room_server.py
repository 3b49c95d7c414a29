"""The rooms of a prefill server: answers in each state of a room, and to bad messages."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rigs.disaggregation.desk_rig import (
    LAYOUT,
    SILENT_S,
    TOKEN,
    Asker,
    Clock,
    PrefillRooms,
    fill,
    until,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.room_server import LONG_POLL_S, _has_changes
from sglang.srt.disaggregation.control import control_listener
from sglang.srt.disaggregation.control.control_client import ControlClient, RoomFailed
from sglang.srt.disaggregation.control.control_listener import (
    UNKEPT_FRAMES_AT_ONCE,
    ControlPeer,
)
from sglang.srt.disaggregation.control.protocol import (
    MAX_POLLED_ROOMS,
    Answer,
    Answered,
    Asked,
    GiveUp,
    Hello,
    KVLayout,
    Pack,
    Packed,
    Poll,
    Question,
    Received,
    Released,
    RoomsPoll,
    RoomsStatus,
    RoomStatus,
)
from sglang.srt.utils.network import can_connect
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

# ---- the way of a room -------------------------------------------------------------------------


def test_hello_is_answered_with_the_offer(asker: Asker) -> None:
    assert asker.ask(Hello()) == LAYOUT
    assert asker.ask(Hello()) == LAYOUT


def test_a_question_waits_for_a_change(prefill: PrefillRooms, asker: Asker) -> None:
    number = asker.send(Poll(1, "me", 0))
    prefill.open(1, [5, 6])
    assert asker.hear() == Answered(number, "instance", RoomStatus(1, True, 0, [5, 6]))
    number = asker.send(Poll(1, "me", 2))
    prefill.add_pages(1, [9])
    assert prefill.senders[1].num_sent == 3
    assert asker.hear() == Answered(number, "instance", RoomStatus(1, True, 2, [9]))
    number = asker.send(Poll(1, "me", 3))
    prefill.complete(1, TOKEN)
    assert asker.hear() == Answered(number, "instance", RoomStatus(1, True, 3, [], TOKEN))
    assert prefill.outcome(1) is None
    assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    assert prefill.outcome(1) == ""
    prefill.end(1)


def test_without_a_change_the_answer_comes_when_the_asker_has_waited(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    prefill.open(2)
    for room, is_known in ((1, False), (2, True)):
        asker.send(Poll(room, "me", 0))
        assert asker.look(room) == RoomStatus(room, is_known)
        clock.now += LONG_POLL_S
        assert asker.hear().answer == RoomStatus(room, is_known)


def test_repeating_a_question_does_not_put_off_its_answer(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    number = asker.send(Poll(1, "me", 0))
    asker.look(1)
    clock.now += 0.6 * LONG_POLL_S
    asker.send(Poll(1, "me", 0), number)
    asker.look(1)
    clock.now += 0.6 * LONG_POLL_S
    assert asker.hear().number == number


def test_who_has_the_token_waits_for_pages(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    fill(prefill, 1)
    asker.send(Poll(1, "me", 2, has_token=True))
    asker.look(1, have=2)
    assert asker.hears_nothing()
    clock.now += LONG_POLL_S
    assert asker.hear().answer == RoomStatus(1, True, 2, [], TOKEN)


def test_each_asker_gets_its_own_answer(
    prefill: PrefillRooms, new_asker: Callable[[], Asker]
) -> None:
    askers = [new_asker() for _ in range(40)]
    for room, one in enumerate(askers):
        one.send(Poll(room, f"reader {room}", 0))
    for room in range(40):
        prefill.open(room, [100 + room])
    assert [one.hear().answer for one in askers] == [
        RoomStatus(room, True, 0, [100 + room]) for room in range(40)
    ]


# ---- before a decode server has slots ----------------------------------------------------------


def test_a_question_about_rooms_claims_none(prefill: PrefillRooms, asker: Asker) -> None:
    number = asker.send(RoomsPoll(1, [1, 2, 3]))
    prefill.open(2)
    assert asker.hear() == Answered(number, "instance", RoomsStatus(1, [2]))
    prefill.open(3)
    prefill.end(3, "out of memory")
    assert asker.ask(RoomsPoll(2, [1, 3], [2])) == RoomsStatus(2, [], {3: "out of memory"})
    assert not prefill.take_claimed()
    assert asker.look(2) == RoomStatus(2, True)
    assert prefill.take_claimed() == [2]


def test_the_end_of_known_rooms_is_reported(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    prefill.open(1)
    number = asker.send(RoomsPoll(1, [], [1]))
    assert asker.look(5) == RoomStatus(5, False)
    assert asker.hears_nothing()
    prefill.end(1, "aborted")
    assert asker.hear() == Answered(number, "instance", RoomsStatus(1, [], {1: "aborted"}))
    asker.send(RoomsPoll(2, [7], []))
    asker.look(5)
    clock.now += LONG_POLL_S
    assert asker.hear().answer == RoomsStatus(2), "there are no news"


def test_rooms_that_no_decode_server_names_are_reported(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    for room in (1, 2, 3, 4):
        prefill.open(room)
    asker.look(4)  # A reader asks for room 4.
    clock.now += SILENT_S
    assert asker.ask(RoomsPoll(1, [1])) == RoomsStatus(1, [1])
    asker.send(RoomsPoll(2, [], [1]))
    asker.look(4)  # The question has come.
    assert prefill.unheard_of([1, 2, 3, 4], SILENT_S) == {}
    clock.now += 1
    never = f"no decode server has asked for it within {SILENT_S} s"
    assert prefill.unheard_of([1, 2, 4], SILENT_S) == {2: never}
    clock.now += SILENT_S
    gone = f"the decode server has not been heard of for {SILENT_S} s"
    assert prefill.unheard_of([1, 3], SILENT_S) == {1: gone, 3: never}


def test_no_room_counts_as_unknown_while_a_decode_server_cannot_name_more(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    prefill.open(1)
    clock.now += SILENT_S + 1
    asker.send(RoomsPoll(1, list(range(10, 10 + MAX_POLLED_ROOMS))))
    asker.look(3)  # The question has come.
    assert prefill.unheard_of([1], SILENT_S) == {}
    prefill.open(2)
    clock.now += SILENT_S + 1
    assert prefill.unheard_of([1, 2], SILENT_S).keys() == {1, 2}


def test_rooms_are_declined_once_and_that_is_confirmed(prefill: PrefillRooms, asker: Asker) -> None:
    prefill.open(1)
    declined = {1: "aborted", 2: "the queue is full"}
    for serial in (1, 2):
        answer = asker.ask(RoomsPoll(serial, [9], [], declined))
        assert answer == RoomsStatus(serial, [], {}), "at once"
    prefill.open(2)
    gave_up = "the decode server gave it up: "
    assert prefill.take_given_up() == {1: gave_up + declined[1], 2: gave_up + declined[2]}
    assert asker.ask(RoomsPoll(3, [1])) == RoomsStatus(3, [], {1: gave_up + declined[1]})


def test_a_room_that_is_being_read_cannot_be_declined(prefill: PrefillRooms, asker: Asker) -> None:
    fill(prefill, 1)
    asker.look(1)
    asker.ask(RoomsPoll(1, [], [], {1: "not mine"}))
    assert prefill.take_given_up() == {}
    assert asker.look(1).failure is None


# ---- its end -----------------------------------------------------------------------------------


def test_received_may_be_said_again_until_the_room_is_forgotten(
    prefill: PrefillRooms, asker: Asker, clock: Clock
) -> None:
    fill(prefill, 1)
    asker.look(1)
    for _ in range(2):
        assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    prefill.end(1)
    prefill.end(1)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    assert prefill._rooms[1].pages == [] and prefill._rooms[1].metadata is None, "a minute is long"
    prefill.forget(1)
    assert asker.look(1) == RoomStatus(1, is_known=False)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_is_read_while_the_room_ends_does_not_count(
    prefill: PrefillRooms, asker: Asker, is_complete: bool
) -> None:
    prefill.open(1, [5])
    if is_complete:
        prefill.complete(1, TOKEN)
    assert asker.look(1).pages == [5]
    prefill.end(1, "out of memory")
    assert asker.look(1) == RoomStatus(1, True, failure="out of memory")
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)
    assert prefill.outcome(1) == "out of memory"


def test_received_before_all_is_there_does_not_count(prefill: PrefillRooms, asker: Asker) -> None:
    prefill.open(1, [5])
    asker.look(1)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)
    assert asker.ask(Received(2, "me")) == Released(2, was_held=False)
    assert prefill.outcome(1) is None, "the reader is there"


def test_a_waiting_question_hears_of_the_end(prefill: PrefillRooms, asker: Asker) -> None:
    prefill.open(1)
    asker.send(Poll(1, "me", 0))
    asker.look(1)
    prefill.end(1, "too long")
    assert asker.hear().answer == RoomStatus(1, True, failure="too long")


def test_a_room_is_read_once(prefill: PrefillRooms, new_asker: Callable[[], Asker]) -> None:
    """Another reader would read pages that are free as soon as the first has its own."""
    first, second = new_asker(), new_asker()
    fill(prefill, 1)
    assert first.look(1, "first").pages == [3, 4]
    news = second.look(1, "second")
    assert news.failure == "the room belongs to another reader: draw one for each request"
    assert (news.pages, news.first_token) == ([], None)
    assert second.ask(Received(1, "second")) == Released(1, was_held=False)
    assert second.ask(GiveUp(1, "second", "because")) == Released(1, was_held=False)
    assert (prefill.outcome(1), prefill.take_given_up()) == (None, {})
    assert first.ask(Received(1, "first")) == Released(1, was_held=True)
    prefill.end(1)
    assert first.look(1, "first").failure == "a decode server has read it already"


def test_a_room_may_be_opened_again_when_it_is_forgotten(
    prefill: PrefillRooms, asker: Asker
) -> None:
    prefill.open(1, [5])
    with pytest.raises(AssertionError, match="room 1 is open"):
        prefill.forget(1)
    assert asker.look(1).pages == [5]
    prefill.end(1, "over")
    assert asker.look(1).failure == "over"
    prefill.forget(1)
    assert not asker.look(1).is_known
    prefill.open(1)
    assert asker.look(1) == RoomStatus(1, True)


# ---- whatever comes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x81" * 2000,
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode(["one", {"type": "Hello"}]),
        msgspec.msgpack.encode([1, {"type": "KVLayout"}]),
        msgspec.msgpack.encode([1, {"type": "Poll", "room": "1", "reader": "", "have_pages": 0}]),
        msgspec.msgpack.encode([1, {"type": "Poll", "room": 1, "reader": "r"}]),
        msgspec.msgpack.encode(Asked(1, Poll(1, "r" * 65, 0))),
        msgspec.msgpack.encode([1, {"type": "GiveUp", "room": 1, "reader": "r", "reason": 3}]),
        msgspec.msgpack.encode([1, {"type": "Hello", "version": 1.5}]),
    ],
)
def test_garbage_is_dropped(prefill: PrefillRooms, asker: Asker, raw: bytes) -> None:
    fill(prefill, 1)
    asker.link.send(raw)
    assert asker.look(1).pages == [3, 4]
    assert asker.hears_nothing()


def test_a_message_that_is_too_large_ends_its_connection_alone(
    prefill: PrefillRooms, new_asker: Callable[[], Asker]
) -> None:
    fill(prefill, 1)
    good, bad = new_asker(), new_asker()
    good.ask(Hello())
    bad.send(GiveUp(1, "me", "x" * (2 << 20)))
    assert good.look(1).pages == [3, 4]

    def is_answered() -> bool:
        bad.send(Poll(1, "me", 1, may_wait=False))
        return bad.link.receive(0.2) is not None

    until(is_answered)  # The second asker has connected anew.


rooms = st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1])
readers = st.text(max_size=64)
questions = st.one_of(
    st.builds(Hello, st.integers(-1, 2)),
    st.builds(Poll, rooms, readers, rooms, st.booleans(), st.just(False)),
    st.builds(
        RoomsPoll,
        rooms,
        st.lists(rooms, max_size=3),
        st.lists(rooms, max_size=3),
        st.dictionaries(rooms, st.text(), min_size=1, max_size=3),
    ),
    st.builds(Received, rooms, readers),
    st.builds(GiveUp, rooms, readers, st.text()),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=64), questions), max_size=8))
def test_whatever_comes_the_server_goes_on(
    prefill: PrefillRooms, asker: Asker, messages: list[bytes | Question]
) -> None:
    if 2 not in prefill._rooms:
        fill(prefill, 2)
    asker.look(2)  # Strangers are answered slowly.
    for message in messages:
        if isinstance(message, bytes):
            asker.link.send(message)
        else:
            assert asker.ask(message) is not None
    assert asker.ask(Hello()) == LAYOUT
    assert asker.hears_nothing()


def test_a_server_that_fails_ends_the_scheduler(
    prefill: PrefillRooms, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would look healthy and serve no request."""

    def fail(question: Question) -> Answer:
        raise KeyError("a defect")

    prefill.open(1)
    assert prefill.senders[1].poll() == KVPoll.Bootstrapping
    monkeypatch.setattr(prefill, "_answer", fail)
    asker.send(Hello())
    until(lambda: not prefill._thread.is_alive())
    with pytest.raises(RuntimeError, match="decode servers are no longer answered") as raised:
        prefill.senders[1].poll()
    assert isinstance(raised.value.__cause__, KeyError)


def test_who_names_a_room_is_no_stranger(
    prefill: PrefillRooms, new_asker: Callable[[], Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers are answered slowly, and make room for others."""
    monkeypatch.setattr(control_listener, "UNKEPT_FRAMES_A_SECOND", 0.05)
    fill(prefill, 1)
    asker = new_asker()
    for _ in range(2 * UNKEPT_FRAMES_AT_ONCE):
        assert asker.look(1).pages == [3, 4]


def test_a_flood_holds_up_no_waiting_question(
    prefill: PrefillRooms, new_asker: Callable[[], Asker]
) -> None:
    flooding, asker = [new_asker() for _ in range(20)], new_asker()
    number = asker.send(Poll(1, "me", 0))
    for _ in range(200):
        for one in flooding:
            one.send(Poll(2, "x", 0, may_wait=False))
    prefill.open(1, [5])
    assert asker.hear(2.0) == Answered(number, "instance", RoomStatus(1, True, 0, [5]))


def test_a_server_with_a_secret_answers_who_has_it() -> None:
    secret = DeploymentSecret("the secret of this deployment")
    prefill = PrefillRooms(LAYOUT, "127.0.0.1", unwanted_s=1, silent_s=60, secret=secret)
    asker = Asker(prefill.port, secret)
    assert asker.ask(Hello()) == LAYOUT
    timeouts = Timeouts(unknown_room=10, waiting=10, silence=10)
    for other in (None, DeploymentSecret("the secret of another deployment")):
        endpoint = f"tcp://127.0.0.1:{prefill.port}"
        why = f"^the prefill server at {endpoint} refuses this server, which has .* secret: give"
        connection = ControlClient(endpoint, LAYOUT.instance_id, other, timeouts)
        with pytest.raises(RoomFailed, match=why):
            connection.ask(Hello(), KVLayout)
        connection.drop()
    asker.link.close()
    prefill.close()


# ---- shutting down -----------------------------------------------------------------------------


def test_what_ended_last_is_still_reported(
    prefill: PrefillRooms, new_asker: Callable[[], Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a decode server would wait until it takes the silence for a failure."""
    busy, asker = new_asker(), new_asker()
    prefill.open(1)
    asker.send(Poll(1, "me", 0))
    asker.look(1)
    replying, go_on = threading.Event(), threading.Event()
    send = ControlPeer.send

    def slow(peer: ControlPeer, message: bytes) -> None:
        replying.set()
        assert go_on.wait(10)
        send(peer, message)

    monkeypatch.setattr(ControlPeer, "send", slow)
    prefill.open(2)
    prefill.end(2, "while the thread is busy, another ends")
    busy.send(Poll(2, "busy", 0))
    assert replying.wait(10)
    prefill.end(1, "the server is shutting down")
    closing = threading.Thread(target=prefill.close)
    closing.start()
    until(lambda: prefill._closing)
    go_on.set()
    assert asker.hear().answer == RoomStatus(1, True, failure="the server is shutting down")
    closing.join(10)
    prefill.close()
    assert not can_connect("127.0.0.1", prefill.port, timeout=1.0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1"):
        PrefillRooms(LAYOUT, "192.0.2.1", unwanted_s=1, silent_s=1)


@pytest.mark.parametrize(("done", "known"), [(0, 1), (1, 0), (1, 1), (2, 1)])
def test_units_are_news_if_they_are_neither_known_nor_read(done: int, known: int) -> None:
    question = Pack(1, "me", 0, 0, [0], 0, 4, 1024, done=done, known=known)
    units = max(done, known)
    assert not _has_changes(Packed(1, 0, done, [0] * (units - done)), question)
    assert _has_changes(Packed(1, 0, done, [0] * (units - done + 1)), question)

"""The prefill server's desk: what it answers in each state of a room, whatever it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.disaggregation.common import room_desk
from sglang.srt.disaggregation.common.protocol import (
    Answer,
    Answered,
    Ask,
    Asked,
    FirstToken,
    GiveUp,
    Hello,
    Offer,
    Question,
    Received,
    Released,
    RoomNews,
)
from sglang.srt.disaggregation.common.room_desk import LONG_POLL_S, RoomDesk
from sglang.srt.utils.network import can_connect, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

OFFER = Offer(2, "instance", "session", "layout", {"page size": "4"}, [])
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d", top_logprobs=[(-0.5, 7)])
UNWANTED_S, SILENT_S = 300, 10


class Clock:
    """Stands, unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asker:
    """A decode server's connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._number = 0

    def send(self, question: Question, number: int | None = None) -> int:
        self._number = self._number + 1 if number is None else number
        self.socket.send(msgspec.msgpack.encode(Asked(self._number, question)))
        return self._number

    def hear(self, timeout_ms: int = 10_000) -> Answered:
        assert self.socket.poll(timeout_ms), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=Answered)

    def ask(self, question: Question) -> Answer:
        number = self.send(question)
        answered = self.hear()
        assert (answered.number, answered.instance_id) == (number, "instance")
        return answered.answer

    def look(self, room: int, reader: str = "me", have: int = 0) -> RoomNews:
        """The state of a room, now."""
        news = self.ask(Ask(room, reader, have, may_wait=False))
        assert isinstance(news, RoomNews)
        return news


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> Iterator[RoomDesk]:
    desk = RoomDesk(OFFER, "127.0.0.1", unwanted_s=UNWANTED_S, silent_s=SILENT_S, clock=clock)
    yield desk
    desk.close()


@pytest.fixture
def new_asker(desk: RoomDesk) -> Iterator[Callable[[], Asker]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield lambda: Asker(context, desk.port)
    context.destroy(linger=0)


@pytest.fixture
def asker(new_asker: Callable[[], Asker]) -> Asker:
    return new_asker()


def until(is_so: Callable[[], bool]) -> None:
    assert wait_until(is_so, 10, interval=0.005)


def fill(desk: RoomDesk, room: int) -> None:
    desk.open(room)
    desk.add_pages(room, [3, 4])
    desk.complete(room, TOKEN)


# ---- the way of a room -------------------------------------------------------------------------


def test_hello_is_answered_with_the_offer(asker: Asker) -> None:
    assert asker.ask(Hello()) == OFFER
    assert asker.ask(Hello()) == OFFER


def test_a_question_waits_for_news(desk: RoomDesk, asker: Asker) -> None:
    number = asker.send(Ask(1, "me", 0))
    desk.open(1)
    desk.add_pages(1, [5, 6])
    assert asker.hear() == Answered(number, "instance", RoomNews(1, True, 0, [5, 6]))
    number = asker.send(Ask(1, "me", 2))
    desk.add_pages(1, [9])
    assert desk.num_pages(1) == 3
    assert asker.hear() == Answered(number, "instance", RoomNews(1, True, 2, [9]))
    number = asker.send(Ask(1, "me", 3))
    desk.complete(1, TOKEN)
    assert asker.hear() == Answered(number, "instance", RoomNews(1, True, 3, [], TOKEN))
    assert desk.outcome(1) is None
    assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    assert desk.outcome(1) == ""
    desk.end(1)


def test_without_news_the_answer_comes_when_the_asker_has_waited(
    desk: RoomDesk, asker: Asker, clock: Clock
) -> None:
    desk.open(2)
    for room, is_known in ((1, False), (2, True)):
        asker.send(Ask(room, "me", 0))
        assert asker.look(room) == RoomNews(room, is_known)
        clock.now += LONG_POLL_S
        assert asker.hear().answer == RoomNews(room, is_known)


def test_repeating_a_question_does_not_put_off_its_answer(
    desk: RoomDesk, asker: Asker, clock: Clock
) -> None:
    number = asker.send(Ask(1, "me", 0))
    asker.look(1)
    clock.now += 0.6 * LONG_POLL_S
    asker.send(Ask(1, "me", 0), number)
    asker.look(1)
    clock.now += 0.6 * LONG_POLL_S
    assert asker.hear().number == number


def test_who_has_the_token_waits_for_pages(desk: RoomDesk, asker: Asker, clock: Clock) -> None:
    fill(desk, 1)
    asker.send(Ask(1, "me", 2, has_token=True))
    asker.look(1, have=2)
    assert not asker.socket.poll(0)
    clock.now += LONG_POLL_S
    assert asker.hear().answer == RoomNews(1, True, 2, [], TOKEN)


def test_each_asker_gets_its_own_answer(desk: RoomDesk, new_asker: Callable[[], Asker]) -> None:
    askers = [new_asker() for _ in range(40)]
    for room, one in enumerate(askers):
        one.send(Ask(room, f"reader {room}", 0))
    for room in range(40):
        desk.open(room)
        desk.add_pages(room, [100 + room])
    assert [one.hear().answer for one in askers] == [
        RoomNews(room, True, 0, [100 + room]) for room in range(40)
    ]


# ---- its end -----------------------------------------------------------------------------------


def test_received_may_be_said_again_until_the_room_is_forgotten(
    desk: RoomDesk, asker: Asker, clock: Clock
) -> None:
    fill(desk, 1)
    asker.look(1)
    for _ in range(2):
        assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    desk.end(1)
    desk.end(1)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=True)
    assert desk._rooms[1].pages == [] and desk._rooms[1].first_token is None, "a minute is long"
    desk.forget(1)
    assert asker.look(1) == RoomNews(1, is_known=False)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_is_read_while_the_room_ends_does_not_count(
    desk: RoomDesk, asker: Asker, is_complete: bool
) -> None:
    desk.open(1)
    desk.add_pages(1, [5])
    if is_complete:
        desk.complete(1, TOKEN)
    assert asker.look(1).pages == [5]
    desk.end(1, "out of memory")
    assert asker.look(1) == RoomNews(1, True, failure="out of memory")
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)
    assert desk.outcome(1) == "out of memory"


def test_received_before_all_is_there_does_not_count(desk: RoomDesk, asker: Asker) -> None:
    desk.open(1)
    desk.add_pages(1, [5])
    asker.look(1)
    assert asker.ask(Received(1, "me")) == Released(1, was_held=False)
    assert asker.ask(Received(2, "me")) == Released(2, was_held=False)
    assert desk.outcome(1) is None, "the reader is there"


def test_a_waiting_question_hears_of_the_end(desk: RoomDesk, asker: Asker) -> None:
    desk.open(1)
    asker.send(Ask(1, "me", 0))
    asker.look(1)
    desk.end(1, "too long")
    assert asker.hear().answer == RoomNews(1, True, failure="too long")


def test_a_room_is_read_once(desk: RoomDesk, new_asker: Callable[[], Asker]) -> None:
    """Another reader would read pages that are free as soon as the first has its own."""
    first, second = new_asker(), new_asker()
    fill(desk, 1)
    assert first.look(1, "first").pages == [3, 4]
    news = second.look(1, "second")
    assert news.failure == "the room belongs to another reader: draw one for each request"
    assert (news.pages, news.first_token) == ([], None)
    assert second.ask(Received(1, "second")) == Released(1, was_held=False)
    assert second.ask(GiveUp(1, "second", "because")) == Released(1, was_held=False)
    assert (desk.outcome(1), desk.take_given_up()) == (None, {})
    assert first.ask(Received(1, "first")) == Released(1, was_held=True)
    desk.end(1)
    assert first.look(1, "first").failure == "a decode server has read it already"


def test_a_room_may_be_opened_again_when_it_is_forgotten(desk: RoomDesk, asker: Asker) -> None:
    desk.open(1)
    desk.add_pages(1, [5])
    with pytest.raises(AssertionError, match="room 1 is open"):
        desk.forget(1)
    assert asker.look(1).pages == [5]
    desk.end(1, "over")
    assert asker.look(1).failure == "over"
    desk.forget(1)
    assert not asker.look(1).is_known
    desk.open(1)
    assert asker.look(1) == RoomNews(1, True)


# ---- readers of several ranks ------------------------------------------------------------------


def test_a_room_is_read_when_all_parts_of_its_reader_have_it(
    desk: RoomDesk, new_asker: Callable[[], Asker], clock: Clock
) -> None:
    fill(desk, 1)
    askers = [new_asker() for _ in range(3)]
    for part, one in enumerate(askers):
        news = one.ask(Ask(1, "me", 0, may_wait=False, part=part, num_parts=3))
        assert news == RoomNews(1, True, 0, [3, 4], TOKEN)
    assert desk.take_claimed() == [1], "they are one reader"
    for part, one in enumerate(askers):
        assert desk.outcome(1) is None
        for _ in range(2):
            assert one.ask(Received(1, "me", part)) == Released(1, was_held=True)
    assert desk.outcome(1) == ""


def test_a_part_that_is_silent_is_missed(desk: RoomDesk, asker: Asker, clock: Clock) -> None:
    """Also if it has never asked, while the others go on."""
    fill(desk, 1)
    for _ in range(3):
        asker.ask(Ask(1, "me", 0, may_wait=False, part=0, num_parts=2))
        assert desk.outcome(1) is None
        clock.now += SILENT_S / 2
    assert desk.outcome(1) == "the decode server has not been heard of for 10 s"


def test_a_part_that_has_all_need_not_be_heard_of(
    desk: RoomDesk, asker: Asker, clock: Clock
) -> None:
    fill(desk, 1)
    asker.ask(Ask(1, "me", 0, may_wait=False, part=0, num_parts=2))
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True)
    clock.now += SILENT_S - 1
    asker.ask(Ask(1, "me", 0, may_wait=False, part=1, num_parts=2))
    clock.now += SILENT_S - 1
    assert desk.outcome(1) is None


def test_a_part_gives_up_for_all(desk: RoomDesk, asker: Asker) -> None:
    fill(desk, 1)
    asker.ask(Ask(1, "me", 0, may_wait=False, part=0, num_parts=2))
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True)
    assert asker.ask(GiveUp(1, "me", "because")) == Released(1, was_held=False)
    assert desk.take_given_up() == {1: "the decode server gave it up: because"}
    assert asker.ask(Received(1, "me", 1)) == Released(1, was_held=False)
    assert asker.ask(Received(1, "me", 0)) == Released(1, was_held=True), "it was, until then"


def test_a_part_that_there_is_not_has_read_nothing(desk: RoomDesk, asker: Asker) -> None:
    fill(desk, 1)
    asker.ask(Ask(1, "me", 0, may_wait=False, part=0, num_parts=1))
    assert asker.ask(Received(1, "me", 5)) == Released(1, was_held=False)
    assert desk.outcome(1) is None


# ---- decode servers that do not want it, or are gone -------------------------------------------


def test_a_room_that_is_given_up_is_told_once(desk: RoomDesk, asker: Asker) -> None:
    desk.open(1)
    asker.look(1)
    for reason in ("aborted" * 200, "second"):
        assert asker.ask(GiveUp(1, "me", reason)) == Released(1, was_held=False)
    given_up = desk.take_given_up()
    assert given_up == {1: "the decode server gave it up: " + ("aborted" * 200)[:500]}
    assert desk.take_given_up() == {}
    assert desk.outcome(1) == given_up[1]
    assert asker.look(1).failure == given_up[1]


def test_a_room_that_has_ended_is_not_given_up(desk: RoomDesk, asker: Asker) -> None:
    fill(desk, 1)
    asker.look(1)
    asker.ask(Received(1, "me"))
    asker.ask(GiveUp(1, "me", "late"))
    assert (desk.outcome(1), desk.take_given_up()) == ("", {})
    fill(desk, 2)
    asker.ask(GiveUp(2, "me", "in time"))
    desk.end(2, "before anybody has looked")
    assert desk.take_given_up() == {}


def test_a_room_may_be_given_up_before_its_request_comes(
    desk: RoomDesk, asker: Asker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_desk, "_MAX_UNWANTED", 2)
    for room in (1, 2, 1, 3):
        asker.ask(GiveUp(room, "me", f"of {room}"))
    for room in (1, 2, 3):
        desk.open(room)
    assert desk.take_given_up() == {
        room: f"the decode server gave it up: of {room}" for room in (1, 3)
    }, "the oldest was forgotten"
    asker.ask(GiveUp(4, "me", "of 4"))
    clock.now += UNWANTED_S + 1
    until(lambda: not desk._unwanted)
    desk.open(4)
    assert desk.take_given_up() == {}, "as late a request is another"


def test_a_room_is_claimed_by_the_first_that_asks_for_it(desk: RoomDesk, asker: Asker) -> None:
    for room in (1, 2, 3):
        desk.open(room)
    asker.ask(Hello())
    asker.ask(Received(2, "me"))
    asker.ask(GiveUp(3, "me", "because"))
    assert desk.take_claimed() == ()
    asker.look(1)
    asker.look(1, "another")
    asker.look(4)
    assert desk.take_claimed() == [1]
    assert desk.take_claimed() == ()


def test_a_reader_that_is_not_heard_of_is_gone(desk: RoomDesk, asker: Asker, clock: Clock) -> None:
    fill(desk, 1)
    asker.look(1)
    clock.now += SILENT_S
    assert desk.outcome(1) is None
    asker.look(1, "somebody else")
    clock.now += 1
    assert desk.outcome(1) == "the decode server has not been heard of for 10 s"


def test_reading_for_long_is_no_silence(desk: RoomDesk, asker: Asker, clock: Clock) -> None:
    fill(desk, 1)
    for _ in range(5):
        clock.now += SILENT_S
        asker.look(1, have=2)
        assert desk.outcome(1) is None
    asker.send(Ask(1, "me", 2, has_token=True))
    asker.ask(Hello())
    clock.now += LONG_POLL_S
    asker.hear()
    clock.now += SILENT_S
    assert desk.outcome(1) is None, "it was heard of until its question was answered"


# ---- whatever comes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x81" * 2000,
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode(["one", {"type": "Hello"}]),
        msgspec.msgpack.encode([1, {"type": "Offer"}]),
        msgspec.msgpack.encode([1, {"type": "Ask", "room": "1", "reader": "", "have_pages": 0}]),
        msgspec.msgpack.encode([1, {"type": "Ask", "room": 1, "reader": "r"}]),
        msgspec.msgpack.encode(Asked(1, Ask(1, "r" * 65, 0))),
        msgspec.msgpack.encode([1, {"type": "GiveUp", "room": 1, "reader": "r", "reason": 3}]),
        msgspec.msgpack.encode([1, {"type": "Hello", "version": 1.5}]),
    ],
)
def test_garbage_is_dropped(desk: RoomDesk, asker: Asker, raw: bytes) -> None:
    fill(desk, 1)
    asker.socket.send(raw)
    asker.socket.send_multipart([raw, raw, raw])
    assert asker.look(1).pages == [3, 4]
    assert not asker.socket.poll(0)


def test_a_message_that_is_too_large_ends_its_connection_alone(
    desk: RoomDesk, new_asker: Callable[[], Asker]
) -> None:
    fill(desk, 1)
    good, bad = new_asker(), new_asker()
    good.ask(Hello())
    bad.send(GiveUp(1, "me", "x" * (2 << 20)))
    assert good.look(1).pages == [3, 4]
    assert bad.look(1, have=1) == good.look(1, have=1), "it has connected anew"


rooms = st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1])
readers = st.text(max_size=64)
questions = st.one_of(
    st.builds(Hello, st.integers(-1, 2)),
    st.builds(Ask, rooms, readers, rooms, st.booleans(), st.just(False)),
    st.builds(Received, rooms, readers),
    st.builds(GiveUp, rooms, readers, st.text()),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=64), questions), max_size=8))
def test_whatever_comes_the_desk_goes_on(
    desk: RoomDesk, asker: Asker, messages: list[bytes | Question]
) -> None:
    for message in messages:
        if isinstance(message, bytes):
            asker.socket.send(message)
        else:
            assert asker.ask(message) is not None
    assert asker.ask(Hello()) == OFFER
    assert not asker.socket.poll(0)


def test_questions_that_wait_are_bounded(
    desk: RoomDesk,
    new_asker: Callable[[], Asker],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_desk, "_MAX_WAITING", 1)
    first, second = new_asker(), new_asker()
    first.send(Ask(1, "a", 0))
    first.look(1)
    second.send(Ask(2, "b", 0))
    second.look(2)
    desk.open(2)
    desk.add_pages(2, [5])
    assert second.look(2, "b").pages == [5]
    assert not second.socket.poll(0), "it has to be repeated"
    clock.now += LONG_POLL_S
    first.hear()
    second.send(Ask(2, "b", 0))
    assert second.hear().answer == RoomNews(2, True, 0, [5])


def test_a_desk_that_fails_ends_the_scheduler(
    desk: RoomDesk, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would look healthy and serve nobody."""

    def fail(question: Question) -> Answer:
        raise KeyError("a defect")

    assert desk.take_claimed() == ()
    monkeypatch.setattr(desk, "_answer", fail)
    asker.send(Hello())
    until(lambda: not desk._thread.is_alive())
    with pytest.raises(RuntimeError, match="nobody answers decode servers") as raised:
        desk.take_claimed()
    assert isinstance(raised.value.__cause__, KeyError)


# ---- shutting down -----------------------------------------------------------------------------


def test_what_ended_last_is_still_told(
    desk: RoomDesk, new_asker: Callable[[], Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a decode server would wait until it takes the silence for a failure."""
    busy, asker = new_asker(), new_asker()
    desk.open(1)
    asker.send(Ask(1, "me", 0))
    asker.look(1)
    replying, go_on = threading.Event(), threading.Event()
    reply = desk._reply

    def slow(*args: Any) -> None:
        replying.set()
        assert go_on.wait(10)
        reply(*args)

    monkeypatch.setattr(desk, "_reply", slow)
    desk.open(2)
    desk.end(2, "while the thread is busy, another ends")
    busy.send(Ask(2, "busy", 0))
    assert replying.wait(10)
    desk.end(1, "the server is shutting down")
    closing = threading.Thread(target=desk.close)
    closing.start()
    assert desk._closing.wait(10)
    go_on.set()
    assert asker.hear().answer == RoomNews(1, True, failure="the server is shutting down")
    closing.join(10)
    desk.close()
    assert not can_connect("127.0.0.1", desk.port, timeout=1.0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(zmq.ZMQError):
        RoomDesk(OFFER, "192.0.2.1", unwanted_s=1, silent_s=1)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

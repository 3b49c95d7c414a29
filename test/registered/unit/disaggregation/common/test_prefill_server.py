"""A prefill server that is asked about rooms: before slots are given, over any network."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from rigs.disaggregation import desk_rig
from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import PrefillRooms, until
from rigs.disaggregation.pd_rig import one_rank
from rigs.disaggregation.prompt_scene import ROOM, Server, sources_of
from rigs.servers.scarce_threads import no_threads
from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, WrongSecret, find
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common import prefill_server
from sglang.srt.disaggregation.common.asked_room import AskedRoom
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.protocol import RoomsStatus
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SHORT_TIMEOUTS = Timeouts(unknown_room=60, waiting=60, silence=0.6)
SILENT = "the prefill server at {} has not answered for 0.6 s"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is not looked up again if the machine stands still for some seconds."""
    monkeypatch.setattr(control_client, "REPEAT_S", 60)
    one = Server()
    yield one
    one.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is missed after 0.6 seconds."""
    monkeypatch.setattr(control_client, "REPEAT_S", 0.05)
    one = Server(SHORT_TIMEOUTS)
    yield one
    one.close()


def is_known(receiver: CommonKVReceiver) -> bool:
    return receiver.poll() == KVPoll.WaitingForInput


def is_unknown(server: Server, room: int) -> bool:
    return server.peer._rooms[room].unknown_since is not None


def has_failed(receiver: CommonKVReceiver) -> bool:
    return receiver.poll() == KVPoll.Failed


def failure(receiver: CommonKVReceiver) -> str:
    until(lambda: has_failed(receiver))
    return desk_rig.failure(receiver)


# ---- rooms -------------------------------------------------------------------------------------


def test_a_room_is_known_when_its_request_is_there_and_is_not_claimed(server: Server) -> None:
    receiver, other = server.ask(), server.ask(6)
    until(lambda: is_unknown(server, 6))
    assert not is_known(receiver)
    server.prefill.open(ROOM)
    until(lambda: is_known(receiver))
    assert sources_of(receiver) == [server.route]
    assert not is_known(other)
    assert not server.prefill.take_claimed(), "it would be computed without slots here"
    server.prefill.open(6)
    until(lambda: is_known(other))
    assert server.look_ups == [0], "one look-up for all rooms"


def test_a_room_that_has_ended_says_why(server: Server) -> None:
    server.prefill.open(ROOM)
    server.prefill.end(ROOM, "the queue is full")
    assert failure(server.ask()) == "the prefill server ended the request: the queue is full"


def test_a_known_room_is_watched_until_there_are_slots(server: Server) -> None:
    server.prefill.open(ROOM)
    server.prefill.open(6)
    receiver, left = server.ask(), server.ask(6)
    until(lambda: is_known(receiver) and is_known(left))
    server.peer.leave(left._room)
    server.prefill.end(ROOM, "out of memory")
    server.prefill.end(6, "out of memory")
    assert failure(receiver) == "the prefill server ended the request: out of memory"
    assert is_known(left), "its prompt hears that itself"


def test_an_unknown_room_fails_alone(server: Server) -> None:
    server.close()
    server = Server(Timeouts(unknown_room=0.3, waiting=60, silence=30))
    try:
        server.prefill.open(6)
        known, unknown = server.ask(6), server.ask()
        assert failure(unknown) == "the prefill server does not know the request in time"
        assert is_known(known)
    finally:
        server.close()


def test_many_rooms_need_one_thread_and_one_connection(server: Server) -> None:
    receivers = [server.ask(room) for room in range(500)]
    for room in range(500):
        server.prefill.open(room)
    until(lambda: all(is_known(one) for one in receivers))
    named = [one for one in threading.enumerate() if one.name == "disagg-peer"]
    assert len(named) == 1 and server.look_ups == [0]


def test_questions_keep_a_pace_whatever_is_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "PACE_S", 0.1)
    monkeypatch.setattr(prefill_server, "BURST_S", 0.0)
    began = time.monotonic()
    for room in range(6):
        server.prefill.open(room)
        until(partial(is_known, server.ask(room)))
    assert time.monotonic() - began >= 0.4, "six questions or more"


def test_the_last_request_of_a_room_counts(server: Server) -> None:
    first = server.ask()
    until(lambda: is_unknown(server, ROOM))
    server.peer.leave(first._room)
    second = server.ask()
    server.prefill.open(ROOM)
    until(lambda: is_known(second))
    assert not is_known(first)


# ---- declined rooms ----------------------------------------------------------------------------


def given_up(prefill: PrefillRooms, rooms: set[int]) -> dict[int, str]:
    """Reasons of rooms that were declined."""
    heard: dict[int, str] = {}

    def are_heard() -> bool:
        heard.update(prefill.take_given_up())
        return heard.keys() >= rooms

    until(are_heard)
    return heard


def test_a_flood_of_declined_rooms_is_sent_whole(server: Server) -> None:
    rooms = set(range(200))
    for room in rooms:
        server.peer.decline(room, f"reason {room}")
    for room in rooms:
        server.prefill.open(room)  # Some come before they are declined, some after.
    heard = given_up(server.prefill, rooms)
    assert heard == {room: f"the decode server gave it up: reason {room}" for room in rooms}
    until(lambda: server.peer.is_idle)


def test_a_request_that_leaves_is_declined(server: Server) -> None:
    server.prefill.open(ROOM)
    receiver = server.ask()
    until(lambda: is_known(receiver))
    receiver.abort("aborted")
    assert given_up(server.prefill, {ROOM}) == {ROOM: "the decode server gave it up: aborted"}


def test_rooms_of_a_server_that_is_away_are_not_declined_for_ever(
    hasty: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    hasty.why = BootstrapError("it cannot be reached")
    for room in range(100):
        hasty.peer.decline(room, "aborted")
    until(lambda: hasty.peer.is_idle and not hasty.peer.has_thread)
    given_up = re.compile(
        r"(\d+) rooms of the prefill server at host:1 could not be declined: the prefill server is "
        r"not found: it cannot be reached"
    )
    lines = [match for text in caplog.messages if (match := given_up.fullmatch(text))]
    # The thread may give up some before the last is declined.
    assert sum(int(match[1]) for match in lines) == 100


def test_rooms_that_wait_to_be_declined_are_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(prefill_server, "_MAX_DECLINED_WAITING", 3)
    with no_threads("disagg-peer"):
        server.peer.decline(0, "no thread")
    for room in range(5):
        server.prefill.open(room)
    with server.peer._lock:  # Its thread tells nothing meanwhile.
        server.peer._declined = {
            n: prefill_server._Declined("early", time.monotonic()) for n in (1, 2, 3)
        }
    server.peer.decline(4, "late")
    assert given_up(server.prefill, {2, 3, 4}).keys() == {2, 3, 4}
    line = "1 rooms of the prefill server at host:1 could not be declined: "
    said = [text.removeprefix(line) for text in caplog.messages if text.startswith(line)]
    assert said[0] == "no thread for the prefill server at host:1: can't start new thread"


def test_what_is_declined_last_is_sent_before_the_end(server: Server) -> None:
    server.prefill.open(ROOM)
    receiver = server.ask()
    until(lambda: is_known(receiver))
    receiver.abort("the server is shutting down")
    server.peer.close()
    given_up(server.prefill, {ROOM})
    until(lambda: not server.peer.has_thread)


def test_a_silent_server_does_not_hold_up_the_end(server: Server) -> None:
    with ControlProxy(server.route.endpoint, lambda *_: ()) as proxy:
        server.through(proxy)
        server.peer.decline(ROOM, "the server is shutting down")
        until(lambda: proxy.counts["lost"] > 0)
        server.peer.close()
        until(lambda: not server.peer.has_thread)


# ---- servers that are not there, or are none ---------------------------------------------------


def test_a_missing_server_fails_old_rooms(hasty: Server) -> None:
    hasty.why = BootstrapError("it cannot be reached")
    began, old = time.monotonic(), hasty.ask()
    assert failure(old) == "the prefill server is not found: it cannot be reached"
    assert time.monotonic() - began >= 0.6
    late = hasty.ask(6)
    hasty.why = None
    hasty.prefill.open(6)
    hasty.knows(6, late)


def test_a_server_that_is_gone_is_a_reason_to_probe_sessions(hasty: Server) -> None:
    hasty.scene.sessions.enter("old", "i", "old")
    hasty.scene.sessions.leave("old")
    hasty.scene.mover.gone = {"old"}
    hasty.why = BootstrapError("it cannot be reached")
    failure(hasty.ask())
    until(lambda: hasty.scene.mover.forgotten == ["old"])


def test_another_secret_fails_at_once(server: Server) -> None:
    server.why = WrongSecret("give both servers the same")
    assert failure(server.ask()) == "the prefill server is not found: give both servers the same"


@pytest.mark.parametrize(
    ("num_ranks", "attn_tp_size", "why"),
    [
        (1024, 1024, "this rank would read from 1024 of its ranks; the limit is 64"),
        (65, 1, "this rank would read from 65 of its ranks; the limit is 64"),
        (3, 2, "its 3 ranks are no multiple of the 2 that split heads"),
        (1, 2, "its 1 ranks are no multiple of the 2 that split heads"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_any_is_receivered(
    server: Server, num_ranks: int, attn_tp_size: int, why: str
) -> None:
    server.route = msgspec.structs.replace(
        server.route, num_ranks=num_ranks, attn_tp_size=attn_tp_size
    )
    assert failure(server.ask()) == f"the prefill server at host:1 cannot serve this one: {why}"
    assert server.look_ups == [0]


def test_all_ranks_to_read_from_are_looked_up_once(server: Server) -> None:
    server.route = msgspec.structs.replace(server.route, num_ranks=3, attn_tp_size=1)
    server.prefill.open(ROOM)
    server.prefill.open(6)
    receivers = [server.ask(), server.ask(6)]
    until(lambda: all(is_known(one) for one in receivers))
    assert [one.rank for one in sources_of(receivers[0])] == [0, 1, 2]
    assert server.look_ups == [0, 1, 2]


def test_a_server_of_another_model_learns_of_declined_rooms(server: Server) -> None:
    server.prefill.close()
    pool = server.scene.there.pool
    layout = PoolGeometry.of([pool], "other weights", pool.dtype).layout("instance", "s")
    server.prefill = server.scene.prefill = PrefillRooms(
        layout, "127.0.0.1", unwanted_s=300, silent_s=300
    )
    server.route = one_rank(f"tcp://127.0.0.1:{server.prefill.port}")
    server.prefill.open(ROOM)
    receiver = server.ask()
    why = "the prefill server at host:1 cannot serve this one: its pages differ: weights other"
    assert failure(receiver).startswith(why)
    receiver.abort(failure(receiver))
    assert why in given_up(server.prefill, {ROOM})[ROOM], "it need not wait for a reader"


def test_a_wrong_endpoint_fails(server: Server) -> None:
    server.route = msgspec.structs.replace(server.route, endpoint="ipc:///tmp/x")
    assert failure(server.ask()).startswith("the prefill server has a wrong endpoint: 'ipc:///t")


# ---- servers that fall silent, or are replaced -------------------------------------------------


def test_a_silent_server_fails_rooms(hasty: Server) -> None:
    hasty.route = one_rank("tcp://127.0.0.1:9")
    assert failure(hasty.ask()) == SILENT.format("tcp://127.0.0.1:9")


def test_a_server_that_falls_silent_fails_known_rooms_too(hasty: Server) -> None:
    is_silent = threading.Event()
    with ControlProxy(
        hasty.route.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)
    ) as proxy:
        hasty.through(proxy)
        hasty.prefill.open(ROOM)
        rooms = [hasty.knows(ROOM)]
        is_silent.set()
        rooms.append(hasty.ask(6))
        assert [failure(one) for one in rooms] == [SILENT.format(proxy.endpoint)] * 2
        is_silent.clear()
        again = hasty.ask(6)
        hasty.prefill.open(6)
        hasty.knows(6, again)


def test_a_busy_arrival_of_rooms_does_not_hide_a_silence(hasty: Server) -> None:
    with ControlProxy(hasty.route.endpoint, lambda *_: ()) as proxy:
        hasty.through(proxy)
        first = hasty.ask(1000)
        for room in range(300):
            hasty.ask(room)
            if has_failed(first):
                break
            time.sleep(0.01)
        assert failure(first) == SILENT.format(proxy.endpoint)


def test_a_replaced_server_fails_what_the_old_one_knew(hasty: Server) -> None:
    """Requests that it did not know may have been sent to the new one."""
    hasty.prefill.open(ROOM)
    old = hasty.knows(ROOM)
    hasty.restart()
    young = hasty.ask(6)
    hasty.prefill.open(6)
    assert failure(old) in (
        "the prefill server was replaced by another instance",
        SILENT.format(sources_of(old)[0].endpoint),
    )
    young = hasty.knows(6, young)
    assert sources_of(young)[0].instance_id == "another"


def test_another_instance_at_the_old_address_is_noticed(hasty: Server) -> None:
    """The port was given to another server."""
    right, hasty.route = hasty.route, one_rank(hasty.route.endpoint, "the instance that ended")
    hasty.prefill.open(ROOM)
    receiver = hasty.ask()
    until(lambda: len(hasty.look_ups) > 1)
    hasty.route = right
    hasty.knows(ROOM, receiver)


def test_messages_may_be_lost_doubled_and_late(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.05)
    rng = random.Random(3)

    def fate(message: bytes, is_question: bool) -> tuple[float, ...]:
        return rng.choice(((), (0.0,), (0.0, 0.03), (0.05,)))

    with ControlProxy(server.route.endpoint, fate) as proxy:
        server.through(proxy)
        receivers = {room: server.ask(room) for room in range(40)}
        for room in range(0, 40, 2):
            server.prefill.open(room)
        for room in range(1, 40, 2):
            receivers[room].abort("aborted")
        until(lambda: all(is_known(receivers[room]) for room in range(0, 40, 2)))
        until(lambda: server.peer._declined == {})
        for room in range(1, 40, 2):
            server.prefill.open(room)
        given_up(server.prefill, set(range(1, 40, 2)))


def test_an_answer_to_an_earlier_question_says_nothing_of_a_later_request(server: Server) -> None:
    """The rooms of both have the same number."""
    room = AskedRoom(ROOM, serial=5)
    server.peer._rooms[ROOM] = room
    server.peer._take(RoomsStatus(4, ended={ROOM: "an earlier request"}))
    assert room.failure is None and room.unknown_since is None
    server.peer._take(RoomsStatus(5, ended={ROOM: "out of memory"}))
    assert room.failure == "the prefill server ended the request: out of memory"


# ---- threads and files -------------------------------------------------------------------------


def test_a_system_without_threads_fails_the_receiver(server: Server) -> None:
    with no_threads("disagg-peer"):
        receiver = server.ask()
    assert failure(receiver) == (
        "no thread for the prefill server at host:1: can't start new thread"
    )
    server.prefill.open(ROOM)
    again = server.ask()
    until(lambda: is_known(again))


def test_the_thread_ends_when_nothing_is_asked_for_a_while(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "IDLE_S", 0.05)
    server.prefill.open(ROOM)
    receiver = server.ask()
    until(lambda: is_known(receiver))
    server.peer.leave(receiver._room)
    until(lambda: not server.peer.has_thread)
    server.prefill.open(6)
    again = server.ask(6)
    until(lambda: is_known(again))
    assert server.look_ups == [0], "its routes are still known"


@contextlib.contextmanager
def dripping() -> Iterator[tuple[int, list[socket.socket]]]:
    """A bootstrap server that sends a byte now and then: its port, and its connections."""
    left, peers = threading.Event(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            listener.settimeout(0.02)
            while not left.is_set():
                with contextlib.suppress(TimeoutError):
                    peers.append(listener.accept()[0])
                for peer in peers:
                    with contextlib.suppress(OSError):
                        peer.send(b"H")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1]), peers
        finally:
            left.set()
            thread.join()
            for peer in peers:
                peer.close()


def test_a_slow_bootstrap_server_costs_a_thread_or_two_whatever_is_asked(
    hasty: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, before = 0, set(threading.enumerate())

    def asking() -> int:
        names = ("ask-bootstrap", "disagg-peer")
        return sum(one.name in names for one in set(threading.enumerate()) - before)

    with dripping() as (port, peers):
        monkeypatch.setattr(
            hasty.peer,
            "_rank",
            hasty.scene.context(
                SHORT_TIMEOUTS, find_rank=lambda *_: find("127.0.0.1", port, 0, timeout=0.2)
            ).rank(),
        )
        receivers = [hasty.ask(room) for room in range(100)]
        while not all(has_failed(one) for one in receivers):
            most = max(most, asking())
            time.sleep(0.01)
        assert "has not answered for 0.2 s" in failure(receivers[0])
        assert most <= 3, "one that asks, one that waits, and one that is ending"
        assert 1 <= len(peers) <= 10
        assert wait_until(lambda: asking() <= 1, 60), "an idle thread is kept for later"

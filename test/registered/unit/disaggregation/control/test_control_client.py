"""Questions of a decode server that stands still itself: its clock goes on meanwhile."""

from __future__ import annotations

import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import LAYOUT, SILENT_S, UNWANTED_S, Clock, PrefillRooms, until
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.control_client import (
    POLL_S,
    ClientPool,
    ControlClient,
    NotAnswered,
    RoomFailed,
)
from sglang.srt.disaggregation.control.protocol import Hello, KVLayout
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SILENCE = 4.0


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The decode server's clock."""
    clock = Clock()
    monkeypatch.setattr(control_client, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def prefill() -> Iterator[PrefillRooms]:
    prefill = PrefillRooms(LAYOUT, "127.0.0.1", unwanted_s=UNWANTED_S, silent_s=SILENT_S)
    yield prefill
    prefill.close()


@pytest.fixture
def proxy(prefill: PrefillRooms) -> Iterator[ControlProxy]:
    with ControlProxy(f"tcp://127.0.0.1:{prefill.port}") as proxy:
        yield proxy


@pytest.fixture
def connection(proxy: ControlProxy, own_clock: Clock) -> Iterator[ControlClient]:
    """A connection that has asked and got its answer."""
    timeouts = Timeouts(unknown_room=60, waiting=60, silence=SILENCE)
    connection = ControlClient(proxy.endpoint, LAYOUT.instance_id, None, timeouts)
    assert connection.ask(Hello(), KVLayout) == LAYOUT
    yield connection
    connection.drop()


def test_an_answer_counts_however_late_it_is_looked_at(
    connection: ControlClient, own_clock: Clock
) -> None:
    connection.begin(Hello())
    assert connection._socket is not None
    select.select([connection._socket], [], [])  # The answer is there.
    own_clock.now += 2 * SILENCE
    assert connection.keep_alive(Hello(), KVLayout, 10.0) == LAYOUT


def test_what_was_not_answered_is_asked_again_before_the_server_counts_as_silent(
    connection: ControlClient, own_clock: Clock, proxy: ControlProxy
) -> None:
    proxy.fate = lambda *_: ()
    connection.begin(Hello())
    until(lambda: proxy.counts["lost"] == 1)
    proxy.fate = lambda *_: (0.0,)
    own_clock.now += 2 * SILENCE
    assert connection.keep_alive(Hello(), KVLayout, 10.0) == LAYOUT


def test_a_server_that_does_not_answer_then_either_counts_as_silent(
    connection: ControlClient, own_clock: Clock, proxy: ControlProxy
) -> None:
    proxy.fate = lambda *_: ()
    connection.begin(Hello())
    own_clock.now += 2 * SILENCE
    assert connection.keep_alive(Hello(), KVLayout) is None
    assert connection.keep_alive(Hello(), KVLayout) is None, "no time has passed"
    own_clock.now += POLL_S
    with pytest.raises(NotAnswered, match="has not answered for 4 s"):
        connection.keep_alive(Hello(), KVLayout)


# ---- clients that wait for the next prompt ------------------------------------------------------


def never() -> str | None:
    return None


@pytest.fixture
def pool(own_clock: Clock) -> Iterator[ClientPool]:
    pool = ClientPool(None, Timeouts(unknown_room=60, waiting=60, silence=SILENCE))
    pool.open()
    yield pool
    pool.close()


def lend(pool: ClientPool, endpoint: str, instance_id: str = LAYOUT.instance_id) -> ControlClient:
    client = pool.lend(endpoint, instance_id, never)
    assert client.ask(Hello(), KVLayout) == LAYOUT
    return client


def test_the_next_prompt_gets_the_connection_of_the_last(
    pool: ClientPool, prefill: PrefillRooms, proxy: ControlProxy
) -> None:
    first, second = lend(pool, proxy.endpoint), lend(pool, proxy.endpoint)
    assert first is not second, "no other prompt uses it meanwhile"
    pool.give_back(first)
    again = pool.lend(proxy.endpoint, LAYOUT.instance_id, lambda: "aborted")
    assert again is first
    with pytest.raises(RoomFailed, match="aborted"):
        again.ask(Hello(), KVLayout)
    second.drop()
    again.drop()


def test_a_late_answer_to_the_last_prompt_is_passed_over(
    pool: ClientPool, proxy: ControlProxy
) -> None:
    first = lend(pool, proxy.endpoint)
    first.begin(Hello())
    assert first._socket is not None
    select.select([first._socket], [], [])
    pool.give_back(first)
    again = pool.lend(proxy.endpoint, LAYOUT.instance_id, never)
    assert again is first
    again.begin(Hello())
    number = again._number
    assert again.keep_alive(Hello(), KVLayout, 10.0) == LAYOUT
    assert again._number == number
    again.drop()


def test_a_connection_of_another_instance_or_address_is_not_lent(
    pool: ClientPool, prefill: PrefillRooms, proxy: ControlProxy
) -> None:
    first = lend(pool, proxy.endpoint)
    pool.give_back(first)
    others = [
        pool.lend(proxy.endpoint, "another", never),
        pool.lend(f"tcp://127.0.0.1:{prefill.port}", LAYOUT.instance_id, never),
    ]
    assert first not in others
    for one in others:
        one.drop()


def test_a_connection_that_the_server_has_closed_is_not_lent(
    pool: ClientPool, prefill: PrefillRooms
) -> None:
    endpoint = f"tcp://127.0.0.1:{prefill.port}"
    first = lend(pool, endpoint)
    pool.give_back(first)
    assert first._socket is not None
    readable = first._socket
    prefill.close()
    select.select([readable], [], [])
    other = pool.lend(endpoint, LAYOUT.instance_id, never)
    assert other is not first
    other.drop()


def test_a_connection_that_was_silent_for_long_is_not_lent(
    pool: ClientPool, proxy: ControlProxy, own_clock: Clock
) -> None:
    """The server may be about to close it: its first question would get lost."""
    first = lend(pool, proxy.endpoint)
    pool.give_back(first)
    own_clock.now += SILENCE / 2
    other = lend(pool, proxy.endpoint)
    assert other is not first
    other.drop()


def test_spare_connections_are_bounded_and_end_with_the_pool(
    pool: ClientPool, proxy: ControlProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "MAX_SPARE", 2)
    clients = [lend(pool, proxy.endpoint) for _ in range(3)]
    for one in clients:
        pool.give_back(one)
    assert [one._is_open for one in clients] == [True, True, False]
    pool.close()
    assert not any(one._is_open for one in clients)
    late = lend(pool, proxy.endpoint)
    pool.give_back(late)
    assert not late._is_open, "nobody would close it"

"""Questions of a decode server that stands still itself: its clock goes on meanwhile."""

from __future__ import annotations

import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import LAYOUT, SILENT_S, UNWANTED_S, Clock, PrefillRooms, until
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.control_client import (
    POLL_S,
    ControlClient,
    NotAnswered,
    Timeouts,
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
    """It has asked and got its answer."""
    timeouts = Timeouts(unknown_room=60, waiting=60, silence=SILENCE)
    connection = ControlClient(proxy.endpoint, None, timeouts, LAYOUT.instance_id)
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""The prefill servers of a decode rank: how many are asked, and who tells them of rooms."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from rigs.disaggregation.desk_rig import failure, until
from rigs.disaggregation.pd_rig import one_rank
from rigs.disaggregation.prompt_scene import Scene, Server, receiver_of
from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common import prefill_servers
from sglang.srt.disaggregation.common.geometry import RankPlace
from sglang.srt.disaggregation.common.prefill_servers import TOO_MANY
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.control_client import ControlClient, NotAnswered
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def test_servers_that_are_asked_are_bounded_and_idle_ones_make_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_servers, "MAX_SERVERS", 2)
    ended = threading.Event()

    def hang(host: str, port: int, rank: int, dp_rank: int) -> Route:
        ended.wait(30)
        raise BootstrapError("it is gone")

    servers = scene.context(find_rank=hang).servers()
    try:
        assert servers.find(("idle", 1)) is not None
        asked = [receiver_of(servers, (host, 1), 5) for host in ("a", "b", "c", "a")]
        for receiver in asked:
            receiver.init()
        polls = [receiver.poll() for receiver in asked]
        waits, fails = KVPoll.Bootstrapping, KVPoll.Failed
        assert polls == [waits, waits, fails, waits]
        assert failure(asked[2]) == TOO_MANY
        asked[2].abort("no slots")
        assert f"room 5 could not be declined: {TOO_MANY}" in caplog.text
    finally:
        ended.set()
        servers.close()


@pytest.mark.parametrize(("rank", "tells"), [(0, True), (1, False)])
def test_one_rank_declines_for_all(scene: Scene, rank: int, tells: bool) -> None:
    servers = scene.context(place=RankPlace(rank, 2, 2)).servers()
    try:
        servers.decline(("host", 1), 5, "aborted")
        peer = servers.find(("host", 1))
        assert peer is not None and peer.has_thread == tells
    finally:
        servers.close()


def test_a_server_that_is_silent_and_not_found_either_is_said_not_to_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine may stand still until the connection's own limit is over."""
    monkeypatch.setattr(control_client, "REPEAT_S", 0.05)
    keep_alive, began = ControlClient.keep_alive, time.monotonic()

    def stand_still(connection: ControlClient, *args: Any) -> Any:
        if len(server.look_ups) < 2:
            return keep_alive(connection, *args)
        until(lambda: time.monotonic() > began + 0.7)
        raise NotAnswered("it has not answered")

    monkeypatch.setattr(ControlClient, "keep_alive", stand_still)
    server = Server(Timeouts(unknown_room=60, waiting=60, silence=0.6))
    with contextlib.closing(server):
        server.route = one_rank("tcp://127.0.0.1:9")
        asked = server.ask()
        until(lambda: bool(server.look_ups))
        server.why = BootstrapError("it cannot be reached")
        until(lambda: asked.poll() == KVPoll.Failed)
    assert failure(asked) == "the prefill server is not found: it cannot be reached"

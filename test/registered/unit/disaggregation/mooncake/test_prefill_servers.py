"""The prefill servers of a decode rank: how many are asked, and who tells them of rooms."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rigs.disaggregation.desk_rig import failure
from rigs.disaggregation.prompt_scene import Scene, receiver_of
from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.transfer_context import RankPlace
from sglang.srt.disaggregation.mooncake import receiver as receiver_module
from sglang.srt.disaggregation.mooncake.receiver import TOO_MANY, PrefillServers
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_servers_that_are_asked_are_bounded_and_idle_ones_make_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_PEERS", 2)
    ended = threading.Event()

    def hang(host: str, port: int, rank: int) -> Route:
        ended.wait(30)
        raise BootstrapError("it is gone")

    servers = PrefillServers(scene.context(find_rank=hang), "decode server")
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
    servers = PrefillServers(scene.context(place=RankPlace(rank, 2, 2)), "decode server")
    try:
        servers.decline(("host", 1), 5, "aborted")
        peer = servers.find(("host", 1))
        assert peer is not None and peer.has_thread == tells
    finally:
        servers.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""Sessions of prefill servers: which are kept, which are forgotten, and when."""

from __future__ import annotations

import socket
import threading

import pytest

from rigs.disaggregation.desk_rig import until
from rigs.disaggregation.pd_rig import LocalMover
from rigs.disaggregation.prompt_scene import ROOM, TOKEN, Scene
from sglang.srt.disaggregation.common import sessions as module
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture
def peers() -> LocalMover:
    return LocalMover()


@pytest.fixture
def sessions(peers: LocalMover) -> Sessions:
    return Sessions(peers, lambda endpoint: endpoint not in peers.gone)


def used(sessions: Sessions, session_id: str, instance_id: str = "i") -> None:
    """A prompt comes from there, and has come."""
    sessions.enter(session_id, instance_id, session_id)
    sessions.leave(session_id)


def test_idle_sessions_of_servers_that_are_gone_end_when_another_is_met(
    sessions: Sessions, peers: LocalMover
) -> None:
    for session_id in ("a", "b", "c"):
        used(sessions, session_id)
    peers.gone = {"a", "b"}
    used(sessions, "d")
    assert wait_until(lambda: sorted(peers.forgotten) == ["a", "b"], 60)
    assert sorted(sessions.known) == ["c", "d"]


def test_a_server_runs_while_it_accepts_control_connections(
    peers: LocalMover, caplog: pytest.LogCaptureFixture
) -> None:
    """The state of the Transfer Engine's own port does not matter."""
    sessions = Sessions(peers)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sessions.enter("127.0.0.1:1", "i", f"tcp://127.0.0.1:{port}")
        sessions.leave("127.0.0.1:1")
        gone = f"tcp://127.0.0.1:{get_free_port()}"
        sessions.enter("127.0.0.1:2", "i", gone)
        sessions.leave("127.0.0.1:2")
        caplog.set_level("INFO", module.logger.name)
        sessions.probe()
        assert wait_until(lambda: peers.forgotten == ["127.0.0.1:2"], 60)
        # A session id may be long: NIXL's has metadata.
        assert wait_until(lambda: f"the prefill server at {gone} is gone" in caplog.messages, 60)
    sessions.probe()
    assert wait_until(lambda: peers.forgotten == ["127.0.0.1:2", "127.0.0.1:1"], 60)


def test_a_session_with_transfers_in_flight_is_kept(sessions: Sessions, peers: LocalMover) -> None:
    peers.gone = {"a", "b"}
    sessions.enter("a", "i", "a")
    sessions.enter("a", "i", "a")
    used(sessions, "b")
    sessions.leave("a")
    sessions.probe()
    assert wait_until(lambda: peers.forgotten == ["b"], 60)
    sessions.leave("a")
    sessions.probe()
    assert wait_until(lambda: peers.forgotten == ["b", "a"], 60)


def test_the_sessions_that_were_used_longest_ago_are_forgotten(
    sessions: Sessions, peers: LocalMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.disaggregation.common.sessions.MAX_IDLE", 3)
    sessions.enter("reads", "i", "reads")
    for number in range(5):
        used(sessions, f"s{number}")
    used(sessions, "s2")
    sessions.enter("new", "i", "new")
    assert peers.forgotten == ["s0", "s1"]
    assert sessions.known == ["reads", "s3", "s4", "s2", "new"]


def test_a_session_of_another_instance_at_its_address_is_made_anew(
    sessions: Sessions, peers: LocalMover
) -> None:
    used(sessions, "a", "old")
    used(sessions, "a", "old")
    assert peers.forgotten == []
    used(sessions, "a", "new")
    assert peers.forgotten == ["a"]
    used(sessions, "a", "new")
    assert (peers.forgotten, sessions.known) == (["a"], ["a"])


def test_reads_of_an_old_instance_are_not_cut_off(sessions: Sessions, peers: LocalMover) -> None:
    sessions.enter("a", "old", "a")
    used(sessions, "a", "new")
    sessions.leave("a")
    assert peers.forgotten == []


def test_idle_sessions_are_probed_as_time_passes(
    sessions: Sessions, peers: LocalMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session_id in ("a", "b"):
        used(sessions, session_id)
    peers.gone = {"a"}
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.0)
    used(sessions, "b")
    assert wait_until(lambda: peers.forgotten == ["a"], 60)


def test_a_probe_that_takes_long_holds_up_no_prompt(peers: LocalMover) -> None:
    probed, may_end = list[str](), threading.Event()

    def runs(endpoint: str) -> bool:
        probed.append(endpoint)
        assert may_end.wait(30)
        return endpoint == "c"

    sessions = Sessions(peers, runs)
    used(sessions, "a")
    used(sessions, "b")
    assert wait_until(lambda: bool(probed), 60)
    used(sessions, "c")
    sessions.enter("a", "i", "a")
    for _ in range(3):
        sessions.probe()
    assert len(probed) == 1, "one after the other"
    may_end.set()
    assert wait_until(lambda: peers.forgotten == ["b"], 60)
    assert sorted(sessions.known) == ["a", "c"], "a prompt came from the first meanwhile"


def test_a_prompt_keeps_its_session_until_its_reads_have_ended(scene: Scene) -> None:
    name = scene.mover.get_session_id()
    scene.prefill.open(ROOM, [4])
    scene.mover.hold = True
    prompt = scene.begin([9])
    until(lambda: bool(scene.mover.begun))
    scene.mover.gone = {scene.endpoint}
    scene.sessions.enter("another", "i", "another")
    prompt.cancel()
    until(lambda: bool(scene.given_up()))
    scene.sessions.probe()
    assert (scene.mover.forgotten, name in scene.sessions.known) == ([], True)
    scene.mover.release()
    scene.end(prompt)
    until(lambda: scene.mover.forgotten == [name])


def test_a_prompt_that_has_come_leaves_its_session(scene: Scene) -> None:
    name = scene.mover.get_session_id()
    scene.prefill.open(ROOM, [4])
    scene.prefill.complete(ROOM, TOKEN)
    prompt = scene.end(scene.begin([9]))
    assert prompt.outcome == TOKEN and scene.sessions.known == [name]
    scene.mover.gone = {scene.endpoint}
    scene.sessions.probe()
    until(lambda: scene.mover.forgotten == [name])


def test_a_prompt_that_fails_ends_the_session_of_a_server_that_is_gone(scene: Scene) -> None:
    name = scene.mover.get_session_id()
    scene.mover.fails = lambda blocks: PeerUnreachable(name, "ended during a transfer")
    scene.mover.gone = {scene.endpoint}
    scene.prefill.open(ROOM, [4])
    assert "ended during a transfer" in scene.failure(scene.begin([9]))
    until(lambda: scene.mover.forgotten == [name])

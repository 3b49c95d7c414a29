"""A prompt on its way to a decode server: over a bad network, with bounds, aborted at any step."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest

from rigs.disaggregation.control_proxy import ControlProxy, Fate
from rigs.disaggregation.desk_rig import until
from rigs.disaggregation.prompt_scene import ROOM, SHORT_TIMEOUTS, TOKEN, Scene
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.room_server import LONG_POLL_S
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.protocol import Asked, Poll, Question
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


# ---- the way of a prompt -----------------------------------------------------------------------


def test_pages_are_read_as_they_come(scene: Scene) -> None:
    prompt = scene.begin([9, 2, 3, 8])
    scene.prefill.open(ROOM, [4])
    until(lambda: len(scene.mover.begun) == 1)
    scene.prefill.add_pages(ROOM, [7, 8])
    until(lambda: len(scene.mover.begun) == 2)
    scene.assert_read([4, 7, 8], [9, 2, 3])
    assert not prompt.has_ended
    scene.prefill.add_pages(ROOM, [1])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(prompt).outcome == TOKEN
    assert (prompt.outcome, prompt.has_ended) == (TOKEN, True)
    assert scene.prefill.outcome(ROOM) == ""
    scene.assert_read([4, 7, 8, 1], [9, 2, 3, 8])


def test_only_what_is_lacking_is_read(scene: Scene) -> None:
    scene.prefill.open(ROOM, [4, 5, 6, 7])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(scene.begin([9, 2], first_page=2)).outcome == TOKEN
    scene.assert_read([6, 7], [9, 2])


def test_a_prompt_that_is_there_needs_the_token_alone(scene: Scene) -> None:
    scene.prefill.open(ROOM, [4, 5])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(scene.begin([], first_page=2)).outcome == TOKEN
    assert scene.mover.begun == []
    assert scene.prefill.outcome(ROOM) == ""


def test_the_request_may_reach_the_prefill_server_later(scene: Scene) -> None:
    prompt = scene.begin([9], timeouts=Timeouts(unknown_room=60, waiting=0.1, silence=30))
    until(lambda: bool(scene.prefill._waiting))
    scene.prefill.open(ROOM, [4])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(prompt).outcome == TOKEN


# ---- a bad network -----------------------------------------------------------------------------


def lossy(share: float) -> Fate:
    """Lose this share of the messages."""
    rng = random.Random(1)
    return lambda message, is_question: () if rng.random() < share else (0.0,)


def always(*delays: float) -> Fate:
    return lambda message, is_question: delays


def delayed_by_turns() -> Fate:
    """Delay messages so that they overtake each other."""
    counter = itertools.count()
    return lambda message, is_question: ((next(counter) % 3) * 0.03, 0.05)


@pytest.mark.parametrize(
    "fate",
    [
        lossy(0.5),
        always(0.0, 0.0),
        always(0.0, 0.06),
        always(0.03),
        delayed_by_turns(),
    ],
    ids=["half lost", "doubled", "doubled later", "delayed", "out of order"],
)
def test_messages_may_be_lost_doubled_and_late(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fate: Fate
) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.05)
    with ControlProxy(scene.endpoint, fate) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9, 2, 3])
        scene.prefill.open(ROOM)
        for page in (4, 7, 8):
            scene.prefill.add_pages(ROOM, [page])
            until(lambda: page in pages_read(scene))  # noqa: B023 - called within this turn
        scene.prefill.complete(ROOM, TOKEN)
        assert scene.end(prompt).outcome == TOKEN
        scene.assert_read([4, 7, 8], [9, 2, 3])
        assert scene.prefill.outcome(ROOM) == ""


def pages_read(scene: Scene) -> set[int]:
    """Pages of the other server that reads have begun for."""
    first = scene.there.geometry.pools[0].buffers[0]
    return {
        (block.remote - first.address) // first.page_bytes
        for transfer in scene.mover.begun
        for block in transfer.blocks[:1]
    }


def test_a_prefill_server_that_is_not_there_is_missed_after_the_silence(scene: Scene) -> None:
    scene.endpoint = "tcp://127.0.0.1:9"
    why = scene.failure(scene.begin([9], timeouts=SHORT_TIMEOUTS))
    assert why == "the prefill server at tcp://127.0.0.1:9 has not answered for 0.4 s"


def test_silence_in_the_middle_fails_the_room(scene: Scene) -> None:
    is_silent = threading.Event()
    with ControlProxy(scene.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)) as proxy:
        scene.endpoint = proxy.endpoint
        timeouts = Timeouts(unknown_room=60, waiting=60, silence=2.0)
        prompt = scene.begin([9, 2], timeouts=timeouts)
        scene.prefill.open(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
        assert prompt.outcome is None
        is_silent.set()
        assert "has not answered" in scene.failure(prompt)


def test_a_silence_shorter_than_the_timeout_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    is_silent = threading.Event()
    with ControlProxy(scene.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9, 2])
        scene.prefill.open(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
        is_silent.set()
        scene.prefill.add_pages(ROOM, [5])
        scene.prefill.complete(ROOM, TOKEN)
        until(lambda: proxy.counts["lost"] > 10)
        assert prompt.outcome is None
        is_silent.clear()
        assert scene.end(prompt).outcome == TOKEN


def test_silence_while_a_read_hangs_fails_the_prompt_and_keeps_its_pages(scene: Scene) -> None:
    """The client learns at once; the pages are free when the transport lets go of them."""
    is_silent = threading.Event()
    scene.mover.hold = True
    with ControlProxy(scene.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9], timeouts=Timeouts(unknown_room=60, waiting=60, silence=2.0))
        scene.prefill.open(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
        is_silent.set()
        until(lambda: isinstance(prompt.outcome, str))
        assert "has not answered" in str(prompt.outcome)
        assert not prompt.has_ended, "the read still writes to the pages"
        scene.mover.release()
        scene.end(prompt)
        assert prompt.has_ended


def test_a_long_read_is_no_silence_on_either_side(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Question] = []

    def listen(message: bytes, is_question: bool) -> Sequence[float]:
        if is_question:
            heard.append(msgspec.msgpack.decode(message, type=Asked).question)
        return (0.0,)

    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    scene.mover.hold = True
    with ControlProxy(scene.endpoint, listen) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9], timeouts=Timeouts(unknown_room=60, waiting=60, silence=1.0))
        scene.prefill.open(ROOM, [4])
        scene.prefill.complete(ROOM, TOKEN)

        def is_kept_alive() -> bool:
            alive = [one for one in heard if isinstance(one, Poll) and not one.may_wait]
            return len(alive) >= 4

        until(is_kept_alive)
        assert (prompt.outcome, prompt.has_ended) == (None, False)
        scene.mover.release()
        assert scene.end(prompt).outcome == TOKEN


# ---- deadlines ---------------------------------------------------------------------------------


def test_an_unknown_room_fails_in_time(scene: Scene) -> None:
    timeouts = Timeouts(unknown_room=0.2, waiting=60, silence=30)
    why = scene.failure(scene.begin([9], timeouts=timeouts))
    assert why == "the prefill server does not know the request in time"


def test_missing_pages_fail_the_room_in_time(scene: Scene) -> None:
    timeouts = Timeouts(unknown_room=60, waiting=0.2, silence=30)
    scene.prefill.open(ROOM, [4])
    why = scene.failure(scene.begin([9, 2], timeouts=timeouts))
    assert why == "the prefill server has not computed more in time"
    assert scene.given_up() == why


def test_once_it_is_known_the_other_bound_counts(scene: Scene) -> None:
    scene.prefill.open(ROOM)
    began = time.monotonic()
    prompt = scene.begin([9], timeouts=Timeouts(unknown_room=1.5, waiting=60, silence=30))
    # The second answer without pages comes after half a second.
    until(lambda: time.monotonic() > began + 1.5 + 2 * LONG_POLL_S)
    assert prompt.outcome is None
    scene.prefill.add_pages(ROOM, [4])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(prompt).outcome == TOKEN


# ---- aborts, at every step ---------------------------------------------------------------------


@pytest.mark.parametrize("step", ["unknown", "known", "begun"])
def test_an_abort_while_pages_are_waited_for(scene: Scene, step: str) -> None:
    prompt = scene.begin([9, 2])
    if step != "unknown":
        scene.prefill.open(ROOM)
    if step == "begun":
        scene.prefill.add_pages(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
    else:
        until(lambda: bool(scene.prefill._waiting))
    prompt.cancel()
    assert scene.failure(prompt) == "the request was aborted"
    if step == "unknown":
        scene.prefill.open(ROOM)  # The request comes too late.
    assert scene.given_up() == "the request was aborted"


def test_an_abort_while_pages_are_read(scene: Scene) -> None:
    scene.mover.hold = True
    scene.prefill.open(ROOM, [4])
    prompt = scene.begin([9])
    until(lambda: len(scene.mover.begun) == 1)
    prompt.cancel()
    assert scene.given_up() == "the request was aborted"
    until(lambda: prompt.outcome == "the request was aborted")
    assert not prompt.has_ended
    assert not scene.mover.begun[0].begin(0, 0, None), "no further block is sent"
    scene.mover.release()
    scene.end(prompt)
    assert prompt.has_ended


def test_an_end_at_the_prefill_server_ends_a_read_that_hangs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    scene.mover.hold = True
    scene.prefill.open(ROOM, [4])
    prompt = scene.begin([9])
    until(lambda: len(scene.mover.begun) == 1)
    scene.prefill.end(ROOM, "out of memory")
    until(lambda: isinstance(prompt.outcome, str))
    assert prompt.outcome == "the prefill server ended the request: out of memory"
    assert not prompt.has_ended
    scene.mover.release()
    scene.end(prompt)

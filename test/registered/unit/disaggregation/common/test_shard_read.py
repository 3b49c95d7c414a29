"""A prompt that does not come: the transport fails, or the prefill server answers wrongly."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from rigs.disaggregation.desk_rig import until
from rigs.disaggregation.pd_rig import LocalMover
from rigs.disaggregation.prompt_scene import ROOM, TOKEN, Scene
from sglang.srt.disaggregation.base.deployment_secret import NONCE_BYTES
from sglang.srt.disaggregation.common.shard_read import STEPS
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.frames import (
    MAX_QUESTION_BYTES,
    VERSION,
    Greeting,
    as_frame,
    take_frame,
)
from sglang.srt.disaggregation.control.protocol import (
    Answer,
    Answered,
    Asked,
    GiveUp,
    Hello,
    KVLayout,
    Poll,
    Question,
    Received,
    Released,
    RoomStatus,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BlockOutcome,
    PeerUnreachable,
    Transfer,
    TransferError,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


# ---- transfers that fail -----------------------------------------------------------------------


def test_an_error_of_the_transport_fails_the_room(scene: Scene) -> None:
    scene.mover.fails = lambda blocks: PeerUnreachable("p", "ended during a transfer")
    scene.prefill.open(ROOM, [4])
    why = scene.failure(scene.begin([9]))
    assert why == "reading from the prefill server failed: peer p ended during a transfer"
    assert scene.given_up() == why


class OtherMover(LocalMover):
    """Reads end as `how` says."""

    def __init__(self, how: Callable[[Transfer], None]) -> None:
        super().__init__()
        self._how = how

    def finish(self, transfer: Transfer) -> None:
        self._how(transfer)


def refuse_address(transfer: Transfer) -> None:
    transfer.end(0, len(transfer.blocks) - 1, BlockOutcome.FAILED)
    transfer.settle()


def test_a_read_without_bytes_fails_the_room(scene: Scene) -> None:
    scene.prefill.open(ROOM, [4])
    prompt = scene.begin([9], engine=OtherMover(refuse_address))
    assert "could not be read within 60 s, or it refuses their addresses" in scene.failure(prompt)


def test_pages_that_the_transport_never_lets_go_of_stay_taken(scene: Scene) -> None:
    scene.prefill.open(ROOM, [4])
    ended = PeerUnreachable("p", "ended during a transfer")
    prompt = scene.begin([9], engine=OtherMover(lambda transfer: transfer.leave(ended)))
    scene.end(prompt)
    assert prompt.outcome == (
        "reading from the prefill server failed, and cannot end: peer p ended during a transfer"
    )
    assert not prompt.has_ended
    name = scene.mover.get_session_id()
    scene.mover.gone = {scene.endpoint, "another"}
    scene.sessions.enter("another", "i", "another")
    scene.sessions.leave("another")
    scene.sessions.probe()
    until(lambda: scene.mover.forgotten == ["another"])
    assert scene.sessions.known == [name], "its transfers are in flight"


def test_a_peer_that_is_known_to_hang_is_not_asked(scene: Scene) -> None:
    class Stalled(LocalMover):
        def begin(self, *args: Any, **fields: Any) -> Transfer:
            raise TransferError("peer p has not answered a call for 21 s")

    scene.prefill.open(ROOM, [4])
    why = scene.failure(scene.begin([9], engine=Stalled()))
    assert why.endswith("failed: peer p has not answered a call for 21 s")


def test_an_unexpected_error_ends_both_sides(scene: Scene) -> None:
    class Broken(LocalMover):
        def begin(self, *args: Any, **fields: Any) -> Transfer:
            raise KeyError("what")

    scene.prefill.open(ROOM, [4])
    why = scene.failure(scene.begin([9], engine=Broken()))
    assert why == "receiving the prompt failed: KeyError: 'what'"
    assert scene.given_up() == "'what'", "prefill need not wait"


# ---- prefill servers that answer wrongly -------------------------------------------------------


class OddPrefill:
    """Answers one connection after the other. A thread."""

    def __init__(self, answer: Callable[[Asked], Sequence[Answered | bytes]]) -> None:
        self.heard: list[Question] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> OddPrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._socket.accept()
                with peer:
                    self._talk(peer)

    def _talk(self, peer: socket.socket) -> None:
        self._send(peer, Greeting(VERSION, bytes(NONCE_BYTES), wants_proof=False))
        received = bytearray()
        while part := peer.recv(4096):
            received += part
            while (message := take_frame(received, MAX_QUESTION_BYTES)) is not None:
                asked = msgspec.msgpack.decode(message, type=Asked)
                self.heard.append(asked.question)
                for answer in self._answer(asked):
                    self._send(peer, answer)

    @staticmethod
    def _send(peer: socket.socket, message: object) -> None:
        raw = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        peer.sendall(as_frame(raw))


def answering(
    layout: KVLayout, news: RoomStatus, *, was_held: bool = True, instance: str = "instance"
) -> Callable[[Asked], Sequence[Answered]]:
    """One answer for each kind of question; `instance` answers all but the first."""

    released = Released(ROOM, was_held)

    def answer(asked: Asked) -> Sequence[Answered]:
        is_first = isinstance(asked.question, Hello)
        one: Answer = layout if is_first else news if isinstance(asked.question, Poll) else released
        return [Answered(asked.number, "instance" if is_first else instance, one)]

    return answer


@pytest.mark.parametrize(
    ("news", "fields", "why"),
    [
        (RoomStatus(ROOM, True, 1, [4]), {}, "answered for other pages than were asked for"),
        (RoomStatus(ROOM, True, 0, [4, 5, 6]), {}, "a prompt of 3 pages, this server expects 2"),
        (RoomStatus(ROOM, True, 0, [4], TOKEN), {}, "a prompt of 1 pages, this server expects 2"),
        (RoomStatus(ROOM, True, 0, [], TOKEN), {}, "a prompt of 0 pages, this server expects 2"),
        (
            RoomStatus(ROOM, True, 0, [4], None),
            {"instance": "j"},
            "was replaced by another instance",
        ),
        (RoomStatus(ROOM, True, failure="no"), {}, "the prefill server ended the request: no"),
        (RoomStatus(ROOM, True, 0, [2**63, 1]), {}, "receiving the prompt failed"),
    ],
)
def test_wrong_answers_fail_the_prompt(
    scene: Scene, news: RoomStatus, fields: dict[str, Any], why: str
) -> None:
    layout = scene.there.geometry.layout("i", scene.mover.get_session_id())
    with OddPrefill(answering(layout, news, **fields)) as prefill:
        scene.endpoint = prefill.endpoint
        assert why in scene.failure(scene.begin([9, 2]))
        until(lambda: isinstance(prefill.heard[-1], GiveUp))
        scene.assert_untouched()


def test_pages_that_were_let_go_of_meanwhile_do_not_count(scene: Scene) -> None:
    layout = scene.there.geometry.layout("i", scene.mover.get_session_id())
    news = RoomStatus(ROOM, True, 0, [4], TOKEN)
    with OddPrefill(answering(layout, news, was_held=False)) as prefill:
        scene.endpoint = prefill.endpoint
        why = scene.failure(scene.begin([9]))
        assert why == "the prefill server let go of the pages while they were read"
        assert [type(one) for one in prefill.heard[:3]] == [Hello, Poll, Received]


def test_unlike_pages_are_refused_before_anything_is_read(scene: Scene) -> None:
    layout = msgspec.structs.replace(
        scene.there.geometry.layout("i", "s"), digest="other", facts={"page size": "64"}
    )
    with OddPrefill(answering(layout, RoomStatus(ROOM, True))) as prefill:
        scene.endpoint = prefill.endpoint
        why = scene.failure(scene.begin([9]))
        assert "the prefill server at host:1 cannot serve this one: its pages differ" in why
        assert "page size 64 there, 2 here" in why
        until(lambda: len(prefill.heard) > 1)
        assert isinstance(prefill.heard[1], GiveUp)
        assert scene.mover.begun == []


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91" * 3000, b"\xa4\xff\xff\xff\xff"])
def test_bytes_that_are_no_answer_are_passed_over(scene: Scene, raw: bytes) -> None:
    layout = scene.there.geometry.layout("i", scene.mover.get_session_id())
    good = answering(layout, RoomStatus(ROOM, True, 0, [4], TOKEN))
    with OddPrefill(lambda asked: [raw, *good(asked), raw]) as prefill:
        scene.endpoint = prefill.endpoint
        assert scene.end(scene.begin([9])).outcome == TOKEN


def test_answers_of_another_kind_are_not_taken(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    odd = RoomStatus(ROOM, True)
    with OddPrefill(lambda asked: [Answered(asked.number, "instance", odd)]) as prefill:
        scene.endpoint = prefill.endpoint
        prompt = scene.begin([9])
        until(lambda: len(prefill.heard) > 2)
        assert all(isinstance(one, Hello) for one in prefill.heard[:3]), "it asks on"
        prompt.cancel()
        assert scene.failure(prompt) == "the request was aborted"


# ---- injected failures -------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_an_injected_failure_says_so(scene: Scene, step: str) -> None:
    scene.prefill.open(ROOM, [4])
    scene.prefill.complete(ROOM, TOKEN)
    why = scene.failure(scene.begin([9], fails_at=step))
    assert why == f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed"
    assert scene.given_up() == why

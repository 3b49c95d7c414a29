"""A prompt on its way to a decode server: whatever the network, the desk and the transport do."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
import zmq

from sglang.srt.disaggregation.common import remote_prompt
from sglang.srt.disaggregation.common.geometry import PoolGeometry
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
from sglang.srt.disaggregation.common.remote_prompt import (
    STEPS,
    Patience,
    RemotePrompt,
    RoomFailed,
    decline_room,
)
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.distributed.device_communicators.transfer_types import (
    BlockOutcome,
    PeerUnreachable,
    Transfer,
    TransferError,
)
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.control_proxy import ControlProxy, Fate
from sglang.test.pd_rig import LocalMover

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

PAGE, PAGES, ROOM = 2, 16, 5
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d")
PATIENT = Patience(bootstrap=60, waiting=60, silence=30)
HASTY = Patience(bootstrap=0.3, waiting=0.3, silence=0.4)


def until(is_so: Callable[[], bool]) -> None:
    assert wait_until(is_so, 10, interval=0.005)


class Place:
    """A pool of two layers whose pages can be told apart, and its geometry."""

    def __init__(self, value: float) -> None:
        self.pool = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 1, 2, 2, "cpu")
        for number, buffer in enumerate(buffer for part in self.pool.parts for buffer in part):
            slots = torch.arange(len(buffer)).reshape(-1, 1, 1)
            buffer.copy_((value + number + slots * 0.01) * torch.ones(1, 1, 2))
        self.geometry = PoolGeometry.of([self.pool], "w")

    def page(self, page: int) -> torch.Tensor:
        """All that the pool has of a page: `[buffers, page size, 2]`."""
        span = slice(page * PAGE, (page + 1) * PAGE)
        buffers = [buffer for part in self.pool.parts for buffer in part]
        return torch.stack([buffer[span, 0].clone() for buffer in buffers])


class Scene:
    """Both places, the desk, and what moves bytes."""

    def __init__(self) -> None:
        self.there, self.here = Place(100), Place(500)
        self.mover = LocalMover()
        offer = self.there.geometry.offer("instance", self.mover.get_session_id())
        self.desk = RoomDesk(offer, "127.0.0.1", unclaimed_s=300, silent_s=300)
        self.endpoint = f"tcp://127.0.0.1:{self.desk.port}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.prompts: list[tuple[RemotePrompt, threading.Thread]] = []

    def begin(
        self,
        own_pages: Sequence[int],
        first_page: int = 0,
        patience: Patience = PATIENT,
        **fields: Any,
    ) -> RemotePrompt:
        prompt = RemotePrompt(
            Bootstrap("host", 1, fields.pop("room", ROOM)),
            own_pages,
            first_page,
            geometry=self.here.geometry,
            mover=fields.pop("mover", self.mover),
            find_endpoint=fields.pop("find_endpoint", lambda host, port: self.endpoint),
            patience=patience,
            context=self.context,
            **fields,
        )
        thread = threading.Thread(target=prompt.run, daemon=True)
        thread.start()
        self.prompts.append((prompt, thread))
        return prompt

    def end(self, prompt: RemotePrompt) -> RemotePrompt:
        """`prompt`, once its thread has ended."""
        (thread,) = [thread for one, thread in self.prompts if one is prompt]
        thread.join(30)
        assert not thread.is_alive(), "it has not ended"
        return prompt

    def failure(self, prompt: RemotePrompt) -> str:
        """Why it did not come."""
        assert self.end(prompt).failure is not None
        assert (prompt.first_token, prompt.has_ended) == (None, True)
        return prompt.failure or ""

    def assert_read(self, theirs: Sequence[int], own: Sequence[int]) -> None:
        """Assert that these pages were read and no others were touched."""
        untouched = Place(500)
        source = dict(zip(own, theirs, strict=True))
        for page in range(PAGES + 1):
            want = self.there.page(source[page]) if page in source else untouched.page(page)
            assert torch.equal(self.here.page(page), want), page

    def assert_untouched(self) -> None:
        self.assert_read([], [])

    def given_up(self) -> str:
        """Why, as the desk has heard it."""
        heard: dict[int, str] = {}

        def is_heard() -> bool:
            heard.update(self.desk.take_given_up())
            return bool(heard)

        until(is_heard)
        return heard[ROOM].removeprefix("the decode server gave it up: ")


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.mover.release()
    for prompt, thread in scene.prompts:
        prompt.cancel()
        thread.join(10)
    scene.desk.close()
    scene.context.destroy(linger=0)


# ---- the way of a prompt -----------------------------------------------------------------------


def test_pages_are_read_as_they_come(scene: Scene) -> None:
    prompt = scene.begin([9, 2, 3, 8])
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    until(lambda: len(scene.mover.begun) == 1)
    scene.desk.add_pages(ROOM, [7, 8])
    until(lambda: len(scene.mover.begun) == 2)
    scene.assert_read([4, 7, 8], [9, 2, 3])
    assert not prompt.has_ended
    scene.desk.add_pages(ROOM, [1])
    scene.desk.complete(ROOM, TOKEN)
    assert scene.end(prompt).first_token == TOKEN
    assert (prompt.failure, prompt.has_ended) == (None, True)
    assert scene.desk.outcome(ROOM) == ""
    scene.assert_read([4, 7, 8, 1], [9, 2, 3, 8])


def test_only_what_is_lacking_is_read(scene: Scene) -> None:
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4, 5, 6, 7])
    scene.desk.complete(ROOM, TOKEN)
    assert scene.end(scene.begin([9, 2], first_page=2)).first_token == TOKEN
    scene.assert_read([6, 7], [9, 2])


def test_a_prompt_that_is_there_needs_the_token_alone(scene: Scene) -> None:
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4, 5])
    scene.desk.complete(ROOM, TOKEN)
    assert scene.end(scene.begin([], first_page=2)).first_token == TOKEN
    assert scene.mover.begun == []
    assert scene.desk.outcome(ROOM) == ""


def test_the_request_may_reach_the_prefill_server_later(scene: Scene) -> None:
    prompt = scene.begin([9], patience=Patience(bootstrap=60, waiting=0.1, silence=30))
    until(lambda: bool(scene.desk._waiting))
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    scene.desk.complete(ROOM, TOKEN)
    assert scene.end(prompt).first_token == TOKEN


# ---- a bad network -----------------------------------------------------------------------------


def lossy(share: float) -> Fate:
    """This share of the messages is lost."""
    rng = random.Random(1)
    return lambda message, is_question: () if rng.random() < share else (0.0,)


def always(*delays: float) -> Fate:
    return lambda message, is_question: delays


def delayed_by_turns() -> Fate:
    """So that messages overtake each other."""
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
    monkeypatch.setattr(remote_prompt, "REPEAT_S", 0.05)
    with ControlProxy(scene.endpoint, fate) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9, 2, 3])
        scene.desk.open(ROOM)
        for page in (4, 7, 8):
            scene.desk.add_pages(ROOM, [page])
            until(lambda: page in pages_read(scene))  # noqa: B023 - called within this turn
        scene.desk.complete(ROOM, TOKEN)
        assert scene.end(prompt).first_token == TOKEN
        scene.assert_read([4, 7, 8], [9, 2, 3])
        assert scene.desk.outcome(ROOM) == ""


def pages_read(scene: Scene) -> set[int]:
    """Pages of the other server that reads have begun for."""
    first = scene.there.geometry.buffers[0]
    return {
        (block.remote - first.address) // first.page_bytes
        for transfer in scene.mover.begun
        for block in transfer.blocks[:1]
    }


def test_a_prefill_server_that_is_not_there_is_missed_after_the_silence(scene: Scene) -> None:
    scene.endpoint = "tcp://127.0.0.1:9"
    why = scene.failure(scene.begin([9], patience=HASTY))
    assert why == "the prefill server at tcp://127.0.0.1:9 has not answered for 0.4 s"


def test_silence_in_the_middle(scene: Scene) -> None:
    is_silent = threading.Event()
    with ControlProxy(scene.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)) as proxy:
        scene.endpoint = proxy.endpoint
        patience = Patience(bootstrap=60, waiting=60, silence=0.4)
        prompt = scene.begin([9, 2], patience=patience)
        scene.desk.open(ROOM)
        scene.desk.add_pages(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
        assert prompt.failure is None
        is_silent.set()
        assert "has not answered" in scene.failure(prompt)


def test_silence_while_a_read_hangs_fails_the_prompt_and_keeps_its_pages(scene: Scene) -> None:
    """The client is told at once; the pages are free when the transport lets go of them."""
    is_silent = threading.Event()
    scene.mover.hold = True
    with ControlProxy(scene.endpoint, lambda *_: () if is_silent.is_set() else (0.0,)) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9], patience=Patience(bootstrap=60, waiting=60, silence=0.4))
        scene.desk.open(ROOM)
        scene.desk.add_pages(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
        is_silent.set()
        until(lambda: prompt.failure is not None)
        assert "has not answered" in (prompt.failure or "")
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

    monkeypatch.setattr(remote_prompt, "REPEAT_S", 0.02)
    scene.mover.hold = True
    with ControlProxy(scene.endpoint, listen) as proxy:
        scene.endpoint = proxy.endpoint
        prompt = scene.begin([9], patience=Patience(bootstrap=60, waiting=60, silence=0.5))
        scene.desk.open(ROOM)
        scene.desk.add_pages(ROOM, [4])
        scene.desk.complete(ROOM, TOKEN)

        def is_kept_alive() -> bool:
            alive = [one for one in heard if isinstance(one, Ask) and not one.may_wait]
            return len(alive) >= 8

        until(is_kept_alive)
        assert (prompt.failure, prompt.has_ended) == (None, False)
        scene.mover.release()
        assert scene.end(prompt).first_token == TOKEN


# ---- deadlines ---------------------------------------------------------------------------------


def test_a_room_that_the_prefill_server_never_gets(scene: Scene) -> None:
    patience = Patience(bootstrap=0.2, waiting=60, silence=30)
    why = scene.failure(scene.begin([9], patience=patience))
    assert why == "the prefill server does not know the request in time"


def test_pages_that_never_come(scene: Scene) -> None:
    patience = Patience(bootstrap=60, waiting=0.2, silence=30)
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    why = scene.failure(scene.begin([9, 2], patience=patience))
    assert why == "the prefill server has not computed more in time"
    assert scene.given_up() == why


# ---- aborts, at every step ---------------------------------------------------------------------


def test_an_abort_before_anything_is_told(scene: Scene) -> None:
    found = threading.Event()

    def find(host: str, port: int) -> str:
        assert found.wait(10)
        return scene.endpoint

    scene.desk.open(ROOM)
    prompt = scene.begin([9], find_endpoint=find)
    prompt.cancel()
    found.set()
    assert scene.failure(prompt) == "the request was aborted"
    assert scene.given_up() == "the request was aborted"
    scene.assert_untouched()


@pytest.mark.parametrize("step", ["unknown", "known", "begun"])
def test_an_abort_while_pages_are_waited_for(scene: Scene, step: str) -> None:
    prompt = scene.begin([9, 2])
    if step != "unknown":
        scene.desk.open(ROOM)
    if step == "begun":
        scene.desk.add_pages(ROOM, [4])
        until(lambda: len(scene.mover.begun) == 1)
    else:
        until(lambda: bool(scene.desk._waiting))
    prompt.cancel()
    assert scene.failure(prompt) == "the request was aborted"
    if step == "unknown":
        scene.desk.open(ROOM)  # It has come too late.
    assert scene.given_up() == "the request was aborted"


def test_an_abort_while_pages_are_read(scene: Scene) -> None:
    scene.mover.hold = True
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    prompt = scene.begin([9])
    until(lambda: len(scene.mover.begun) == 1)
    prompt.cancel()
    assert scene.given_up() == "the request was aborted"
    assert prompt.failure == "the request was aborted"
    assert not prompt.has_ended
    scene.mover.release()
    scene.end(prompt)
    assert prompt.has_ended


def test_an_end_at_the_prefill_server_ends_a_read_that_hangs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prompt, "REPEAT_S", 0.02)
    scene.mover.hold = True
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    prompt = scene.begin([9])
    until(lambda: len(scene.mover.begun) == 1)
    scene.desk.end(ROOM, "out of memory")
    until(lambda: prompt.failure is not None)
    assert prompt.failure == "the prefill server ended the request: out of memory"
    assert not prompt.has_ended
    scene.mover.release()
    scene.end(prompt)


# ---- transfers that fail -----------------------------------------------------------------------


def test_an_error_of_the_transport(scene: Scene) -> None:
    scene.mover.fails = lambda blocks: PeerUnreachable("p", "ended during a transfer")
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
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


def test_a_read_that_ends_without_its_bytes(scene: Scene) -> None:
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    prompt = scene.begin([9], mover=OtherMover(refuse_address))
    assert "could not be read within 60 s, or it refuses their addresses" in scene.failure(prompt)


def test_pages_that_the_transport_never_lets_go_of_stay_taken(scene: Scene) -> None:
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    prompt = scene.begin([9], mover=OtherMover(lambda transfer: transfer.leave()))
    scene.end(prompt)
    assert prompt.failure == "reading from the prefill server failed, and cannot end"
    assert not prompt.has_ended


def test_a_peer_that_is_known_to_hang_is_not_asked(scene: Scene) -> None:
    class Stalled(LocalMover):
        def begin(self, *args: Any, **fields: Any) -> Transfer:
            raise TransferError("peer p has not answered a call for 21 s")

    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    why = scene.failure(scene.begin([9], mover=Stalled()))
    assert why.endswith("failed: peer p has not answered a call for 21 s")


def test_an_error_that_nobody_expected(scene: Scene) -> None:
    class Broken(LocalMover):
        def begin(self, *args: Any, **fields: Any) -> Transfer:
            raise KeyError("what")

    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    why = scene.failure(scene.begin([9], mover=Broken()))
    assert why == "receiving the prompt failed: KeyError: 'what'"
    assert scene.given_up() == "'what'", "prefill need not wait"


def test_a_bootstrap_server_that_is_not_there(scene: Scene) -> None:
    def find(host: str, port: int) -> str:
        raise RoomFailed(f"nothing listens at {host}:{port}")

    assert scene.failure(scene.begin([9], find_endpoint=find)) == "nothing listens at host:1"


# ---- desks that answer wrongly -----------------------------------------------------------------


class OddDesk:
    """Answers as it is told. A thread."""

    def __init__(self, answer: Callable[[Asked], Sequence[Answered | bytes]]) -> None:
        self.heard: list[Question] = []
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> OddDesk:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(20):
                continue
            sender, raw = self._socket.recv_multipart()
            asked = msgspec.msgpack.decode(raw, type=Asked)
            self.heard.append(asked.question)
            for answer in self._answer(asked):
                raw = answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
                self._socket.send_multipart([sender, raw])


def answering(
    offer: Offer, news: RoomNews, *, was_held: bool = True, instance: str = "i"
) -> Callable[[Asked], Sequence[Answered]]:
    """One answer for each kind of question; `instance` answers all but the first."""

    released = Released(ROOM, was_held)

    def answer(asked: Asked) -> Sequence[Answered]:
        is_first = isinstance(asked.question, Hello)
        one: Answer = offer if is_first else news if isinstance(asked.question, Ask) else released
        return [Answered(asked.number, "i" if is_first else instance, one)]

    return answer


@pytest.mark.parametrize(
    ("news", "fields", "why"),
    [
        (RoomNews(ROOM, True, 1, [4]), {}, "answered for other pages than were asked for"),
        (RoomNews(ROOM, True, 0, [4, 5, 6]), {}, "a prompt of 3 pages, this server expects 2"),
        (RoomNews(ROOM, True, 0, [4], TOKEN), {}, "a prompt of 1 pages, this server expects 2"),
        (RoomNews(ROOM, True, 0, [], TOKEN), {}, "a prompt of 0 pages, this server expects 2"),
        (RoomNews(ROOM, True, 0, [4], None), {"instance": "j"}, "was replaced by another instance"),
        (RoomNews(ROOM, True, failure="no"), {}, "the prefill server ended the request: no"),
        (RoomNews(ROOM, True, 0, [2**63, 1]), {}, "receiving the prompt failed"),
    ],
)
def test_wrong_answers_fail_the_prompt(
    scene: Scene, news: RoomNews, fields: dict[str, Any], why: str
) -> None:
    offer = scene.there.geometry.offer("i", scene.mover.get_session_id())
    with OddDesk(answering(offer, news, **fields)) as desk:
        scene.endpoint = desk.endpoint
        assert why in scene.failure(scene.begin([9, 2]))
        until(lambda: isinstance(desk.heard[-1], GiveUp))
        scene.assert_untouched()


def test_pages_that_were_let_go_of_meanwhile_do_not_count(scene: Scene) -> None:
    offer = scene.there.geometry.offer("i", scene.mover.get_session_id())
    news = RoomNews(ROOM, True, 0, [4], TOKEN)
    with OddDesk(answering(offer, news, was_held=False)) as desk:
        scene.endpoint = desk.endpoint
        why = scene.failure(scene.begin([9]))
        assert why == "the prefill server let go of the pages while they were read"
        assert [type(one) for one in desk.heard[:3]] == [Hello, Ask, Received]


def test_unlike_pages_are_refused_before_anything_is_read(scene: Scene) -> None:
    offer = msgspec.structs.replace(
        scene.there.geometry.offer("i", "s"), layout="other", layout_facts={"page size": "64"}
    )
    with OddDesk(answering(offer, RoomNews(ROOM, True))) as desk:
        scene.endpoint = desk.endpoint
        why = scene.failure(scene.begin([9]))
        assert "the prefill server at host:1 cannot serve this one: its pages differ" in why
        assert "page size 64 there, 2 here" in why
        until(lambda: len(desk.heard) > 1)
        assert isinstance(desk.heard[1], GiveUp)
        assert scene.mover.begun == []


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91" * 3000, b"\xa4\xff\xff\xff\xff"])
def test_bytes_that_are_no_answer_are_passed_over(scene: Scene, raw: bytes) -> None:
    offer = scene.there.geometry.offer("i", scene.mover.get_session_id())
    good = answering(offer, RoomNews(ROOM, True, 0, [4], TOKEN))
    with OddDesk(lambda asked: [raw, *good(asked), raw]) as desk:
        scene.endpoint = desk.endpoint
        assert scene.end(scene.begin([9])).first_token == TOKEN


def test_answers_of_another_kind_are_not_taken(scene: Scene) -> None:
    with OddDesk(lambda asked: [Answered(asked.number, "i", RoomNews(ROOM, True))]) as desk:
        scene.endpoint = desk.endpoint
        patience = Patience(bootstrap=60, waiting=60, silence=2)
        prompt = scene.begin([9], patience=patience)
        until(lambda: len(desk.heard) > 2)
        assert all(isinstance(one, Hello) for one in desk.heard[:3]), "it asks on"
        prompt.cancel()
        assert scene.failure(prompt) == "the request was aborted"


# ---- injected failures, and rooms that are declined --------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_an_injected_failure_says_so(scene: Scene, step: str) -> None:
    scene.desk.open(ROOM)
    scene.desk.add_pages(ROOM, [4])
    scene.desk.complete(ROOM, TOKEN)
    why = scene.failure(scene.begin([9], fails_at=step))
    assert why == f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed"
    assert scene.given_up() == why


def test_a_room_that_is_declined_ends_at_the_prefill_server(scene: Scene) -> None:
    scene.desk.open(ROOM)
    meeting = Bootstrap("host", 1, ROOM)

    def decline(find: Callable[[str, int], str]) -> None:
        decline_room(
            meeting, "queue full", find_endpoint=find, patience=PATIENT, context=scene.context
        )

    def nowhere(host: str, port: int) -> str:
        raise RoomFailed("nowhere")

    decline(nowhere)
    decline(lambda host, port: scene.endpoint)
    assert scene.given_up() == "queue full"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""Prompts whose pages are packed: over a bad network, without memory, aborted, and failing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import Asker, until
from rigs.disaggregation.prompt_scene import LONG_TIMEOUTS, PAGES, ROOM, TOKEN, Scene
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.packing import WINDOW
from sglang.srt.disaggregation.common.staging import NUM_BUFFERS, LinkCosts, StagingBuffer
from sglang.srt.disaggregation.control import control_client
from sglang.srt.disaggregation.control.protocol import (
    Answered,
    Asked,
    Pack,
    Packed,
    Poll,
    Received,
)
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

UNIT: int = 100
"""Bytes: six pages of a buffer, which are 16 each. There are four buffers."""
THEIRS, OWN = [4, 7, 8, 1, 12, 3, 16, 9], [9, 2, 3, 8, 1, 14, 5, 6]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(UNIT)
    yield scene
    scene.close()


def fill(scene: Scene, pages: Sequence[int] = THEIRS) -> None:
    scene.prefill.open(ROOM, pages)
    scene.prefill.complete(ROOM, TOKEN)


def lengths(scene: Scene) -> list[list[int]]:
    """Lengths of the blocks of each read."""
    return [[block.length for block in one.blocks] for one in scene.mover.begun]


def assert_all_free(scene: Scene) -> None:
    """The memory of both sides is nobody's."""
    for staging in (scene.units, scene.staging):
        until(lambda staging=staging: len(staging._free) == staging._num_made)  # type: ignore[misc]


def test_units_are_read_whole(scene: Scene) -> None:
    fill(scene)
    prompt = scene.end(scene.begin(OWN))
    assert prompt.outcome == TOKEN
    scene.assert_read(THEIRS, OWN)
    # 32 pages of 16 bytes, six at once.
    assert lengths(scene) == [[96]] * 5 + [[32]]
    metric = prompt.get_transfer_metric()
    assert metric.transfer_total_bytes == 32 * 16 and metric.transfer_latency_s > 0
    assert_all_free(scene)
    assert scene.prefill.outcome(ROOM) == ""


def test_pages_are_packed_as_they_come(scene: Scene) -> None:
    prompt = scene.begin(OWN, first_page=1)
    scene.prefill.open(ROOM, [15, *THEIRS[:3]])
    until(lambda: sum(map(sum, lengths(scene))) == 3 * 64)
    scene.prefill.add_pages(ROOM, THEIRS[3:])
    scene.prefill.complete(ROOM, TOKEN)
    assert scene.end(prompt).outcome == TOKEN
    scene.assert_read(THEIRS, OWN)
    assert lengths(scene) == [[96]] * 5 + [[32]], "two units of the first pages, four of the others"


def test_what_is_one_block_already_is_not_packed() -> None:
    """Four blocks, or one unit and the time that packing takes."""
    link = LinkCosts(block_s=1.0, bytes_per_s=1e9, packing_s=3.0, unit_s=1.0)
    scene = Scene(1000, link)
    try:
        fill(scene, [4, 5, 6])
        assert scene.end(scene.begin([7, 8, 9])).outcome == TOKEN
        scene.assert_read([4, 5, 6], [7, 8, 9])
        assert lengths(scene) == [[48] * 4]
    finally:
        scene.close()


def test_a_page_that_no_unit_holds_is_not_packed() -> None:
    scene = Scene(15)
    try:
        fill(scene)
        assert scene.end(scene.begin(OWN)).outcome == TOKEN
        scene.assert_read(THEIRS, OWN)
        assert len(scene.mover.begun) == 1
    finally:
        scene.close()


def test_a_server_that_packs_nothing_is_read_from_pool_to_pool() -> None:
    scene = Scene()
    try:
        scene.link = LinkCosts(block_s=1.0, bytes_per_s=1e9, packing_s=0.0, unit_s=0.0)
        fill(scene)
        assert scene.end(scene.begin(OWN)).outcome == TOKEN
        scene.assert_read(THEIRS, OWN)
    finally:
        scene.close()


@pytest.mark.parametrize("side", ["here", "there"])
def test_without_memory_pages_are_read_from_pool_to_pool(side: str) -> None:
    """After as long as that takes."""
    scene = Scene(UNIT, LinkCosts(block_s=0.005, bytes_per_s=1e9, packing_s=0.0, unit_s=0.0))
    try:
        staging = scene.staging if side == "here" else scene.units
        taken = [staging.take(0) for _ in range(NUM_BUFFERS)]
        fill(scene)
        assert scene.end(scene.begin(OWN)).outcome == TOKEN
        scene.assert_read(THEIRS, OWN)
        assert len(scene.mover.begun) == 1
        for buffer in taken:
            assert buffer is not None
            buffer.give_back()
        # Units of a packing that was given up are not packed later.
        assert_all_free(scene)
    finally:
        scene.close()


@pytest.mark.parametrize("seed", range(3))
def test_messages_may_be_lost_doubled_and_late(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Many prompts at once share the memory."""
    rng = random.Random(seed)

    def fate(message: bytes, is_question: bool) -> Sequence[float]:
        kind = rng.random()
        if kind < 0.15:
            return ()
        return (0.0, rng.random() * 0.05) if kind < 0.3 else (rng.random() * 0.005,)

    monkeypatch.setattr(control_client, "REPEAT_S", 0.03)
    places = rng.sample(range(1, PAGES + 1), PAGES)
    with ControlProxy(scene.endpoint, fate) as proxy:
        scene.endpoint = proxy.endpoint
        prompts = []
        for number in range(4):
            own = places[4 * number : 4 * number + 4]
            prompts.append((scene.begin(own, room=100 + number), own, rng.sample(range(16), 4)))
        for number, (_, _, theirs) in enumerate(prompts):
            room = 100 + number
            scene.prefill.open(room, theirs[:1])
            scene.prefill.add_pages(room, theirs[1:])
            scene.prefill.complete(room, TOKEN)
        for prompt, _, _ in prompts:
            assert scene.end(prompt).outcome == TOKEN
    scene.assert_read(
        [page for _, _, theirs in prompts for page in theirs],
        [page for _, own, _ in prompts for page in own],
    )
    for number in range(4):
        scene.prefill.end(100 + number)
    assert_all_free(scene)


# ---- answers of the prefill server -------------------------------------------------------------


class Packing(Asker):
    """A part that says what it likes."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.prefill.port)
        buffers = [pool.address for pool in scene.there.geometry.pools[0].buffers]
        self.pack = Pack(ROOM, "me", 0, 0, buffers, 0, len(THEIRS), UNIT)


def test_a_part_of_the_room_alone_may_ask(scene: Scene) -> None:
    asker = Packing(scene)
    why = "pages were to be packed of a room that is not being read"
    assert asker.ask(asker.pack) == Packed(ROOM, 0, failure=why)
    fill(scene)
    assert asker.ask(asker.pack) == Packed(ROOM, 0, failure=why), "nobody has asked for it"
    asker.ask(Poll(ROOM, "me", 0, may_wait=False))
    for other in ({"reader": "another"}, {"part": 1}):
        assert asker.ask(msgspec.structs.replace(asker.pack, **other)) == Packed(
            ROOM, 0, failure=why
        )
    answer = asker.ask(asker.pack)
    assert isinstance(answer, Packed) and answer.places
    asker.ask(Received(ROOM, "me"))
    assert asker.ask(asker.pack) == Packed(ROOM, 0, failure=why)
    assert_all_free(scene)


def test_what_is_said_counts_though_the_next_question_comes_before_its_answer(
    scene: Scene,
) -> None:
    fill(scene)
    asker = Packing(scene)
    asker.ask(Poll(ROOM, "me", 0, may_wait=False))
    asker.ask(asker.pack)
    until(lambda: scene.units._num_made - len(scene.units._free) == WINDOW)
    asker.send(msgspec.structs.replace(asker.pack, done=6))
    asker.send(Poll(ROOM, "me", 0))
    assert_all_free(scene)


def test_a_server_that_packs_nothing_says_so() -> None:
    scene = Scene()
    try:
        fill(scene)
        asker = Packing(scene)
        asker.ask(Poll(ROOM, "me", 0, may_wait=False))
        assert asker.ask(asker.pack) == Packed(ROOM, 0, failure="it packs no pages")
    finally:
        scene.close()


# ---- ends, at every step -----------------------------------------------------------------------


def begun(scene: Scene) -> None:
    """A prompt, whose first reads hang."""
    scene.mover.hold = True
    fill(scene)
    scene.begin(OWN)
    until(lambda: len(scene.mover.begun) >= 2)


def test_a_room_that_ends_gives_its_units_back_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they may still be read. Memory of the reader is kept until nothing is."""
    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    begun(scene)
    scene.prefill.end(ROOM, "out of memory")
    until(lambda: len(scene.units._free) == scene.units._num_made)
    (prompt,) = scene.prompts
    until(lambda: isinstance(prompt.outcome, str))
    assert prompt.outcome == "the prefill server ended the request: out of memory"
    assert len(scene.staging._free) < scene.staging._num_made
    assert not prompt.has_ended
    scene.mover.release()
    scene.end(prompt)
    assert prompt.has_ended
    assert_all_free(scene)


def test_an_abort_while_units_are_read(scene: Scene) -> None:
    begun(scene)
    (prompt,) = scene.prompts
    prompt.cancel()
    assert scene.given_up() == "the request was aborted"
    assert not prompt.has_ended
    scene.mover.release()
    scene.end(prompt)
    scene.prefill.end(ROOM)
    assert_all_free(scene)


def test_a_read_that_fails(scene: Scene) -> None:
    fill(scene)
    scene.mover.fails = lambda blocks: PeerUnreachable("p", "is gone")
    why = scene.failure(scene.begin(OWN))
    assert why == "reading from the prefill server failed: peer p is gone"
    scene.prefill.end(ROOM)
    assert_all_free(scene)


def test_a_failure_to_pack_fails_the_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(StagingBuffer, "pack", fail)
    fill(scene)
    why = "the prefill server ended the request: packing pages failed: RuntimeError: no memory"
    assert scene.failure(scene.begin(OWN)) == why


def test_missing_units_fail_the_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first does, so that pages are not read from pool to pool."""
    packs = [True]
    pack = StagingBuffer.pack

    def once(buffer: StagingBuffer, *args: object) -> None:
        if not packs:
            assert scene_is_over()
            return
        packs.clear()
        pack(buffer, *args)  # type: ignore[arg-type]

    def scene_is_over() -> bool:
        until(lambda: isinstance(scene.prompts[0].outcome, str))
        return True

    monkeypatch.setattr(StagingBuffer, "pack", once)
    fill(scene)
    timeouts = Timeouts(unknown_room=60, waiting=0.2, silence=30)
    why = scene.failure(scene.begin(OWN, timeouts=timeouts))
    assert why == "the prefill server has not packed more pages in time"


def test_the_reader_is_heard_of_while_units_are_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Pack] = []

    def listen(message: bytes, is_question: bool) -> Sequence[float]:
        if is_question:
            question = msgspec.msgpack.decode(message, type=Asked).question
            if isinstance(question, Pack):
                heard.append(question)
        return (0.0,)

    monkeypatch.setattr(control_client, "REPEAT_S", 0.02)
    with ControlProxy(scene.endpoint, listen) as proxy:
        scene.endpoint = proxy.endpoint
        begun(scene)
        count = len(heard)
        until(lambda: len(heard) > count + 8)
        (prompt,) = scene.prompts
        assert prompt.outcome is None
        scene.mover.release()
        assert scene.end(prompt).outcome == TOKEN
    scene.assert_read(THEIRS, OWN)
    assert {one.number for one in heard} == {0}
    assert max(one.done for one in heard) == 6, "the last unit is given back too"


WRONG: dict[str, tuple[Callable[[Packed], Packed], str]] = {
    "units that were not asked for": (
        lambda packed: msgspec.structs.replace(packed, places=[*packed.places] * 9),
        "the prefill server packed more pages than were asked for",
    ),
    "a unit is left out": (
        lambda packed: msgspec.structs.replace(packed, first=packed.first + 9),
        "the prefill server answered for other pages than were asked for",
    ),
    "another packing": (
        lambda packed: msgspec.structs.replace(packed, number=7),
        "the prefill server answered for other pages than were asked for",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_answers_that_cannot_be(scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    change, why = WRONG[kind]
    encode = msgspec.msgpack.encode

    def spoiled(message: object) -> bytes:
        answer = message.answer if isinstance(message, Answered) else None
        if isinstance(message, Answered) and isinstance(answer, Packed) and answer.places:
            message = msgspec.structs.replace(message, answer=change(answer))
        return encode(message)

    monkeypatch.setattr(msgspec.msgpack, "encode", spoiled)
    fill(scene)
    assert scene.failure(scene.begin(OWN, timeouts=LONG_TIMEOUTS)) == why

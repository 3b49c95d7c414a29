"""Units of packed pages: whose they are, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from rigs.disaggregation.pd_rig import LocalMover
from sglang.srt.disaggregation.common.packing import WINDOW, Packer
from sglang.srt.disaggregation.common.staging import (
    NUM_BUFFERS,
    Piece,
    Staging,
    StagingBuffer,
    rounds,
)
from sglang.srt.disaggregation.control.protocol import Pack, Packed
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ROWS = {
    1000: torch.arange(60).view(20, 3),
    2000: torch.arange(100, 200, dtype=torch.int16).view(20, 5),
}
"""Pages of 24 and of 10 bytes."""
PAGES = [7, 3, 4, 19, 0, 11, 12]
FIRST = Pack(5, "reader", 0, 0, [1000, 2000], 0, len(PAGES), 48)
"""Two pages of the first buffer are a unit, and four of the second."""
UNITS = list(rounds([24, 10], len(PAGES), 48))


class Place:
    """A packer, and what it has answered."""

    def __init__(self) -> None:
        self.staging = Staging(LocalMover(), torch.device("cpu"), num_bytes=64)
        self.buffers: dict[int, torch.Tensor] = {}
        for buffer in [self.staging.take(0) for _ in range(NUM_BUFFERS)]:
            assert buffer is not None
            self.buffers[buffer.address] = buffer.memory
            buffer.give_back()
        self.packer = Packer(ROWS, self.staging)
        self.packer.start(lambda: None)

    @property
    def num_free(self) -> int:
        return len(self.staging._free)

    def until_free(self, count: int) -> None:
        assert wait_until(lambda: self.num_free == count, 60, interval=0.002)

    def ask(self, **fields: int) -> Packed:
        return self.packer.ask(msgspec.structs.replace(FIRST, **fields), PAGES)

    def packed(self, count: int, **fields: int) -> Packed:
        """The answer, once it has `count` units."""
        answers: list[Packed] = []

        def is_so() -> bool:
            answers.append(self.ask(**fields))
            return len(answers[-1].places) == count

        assert wait_until(is_so, 60, interval=0.002), answers[-1]
        return answers[-1]

    def assert_holds(self, place: int, unit: int) -> None:
        memory = self.buffers[place]
        for piece in UNITS[unit]:
            rows = list(ROWS.values())[piece.place][PAGES[piece.begin : piece.end]]
            assert torch.equal(piece.span(memory), rows.contiguous().view(torch.uint8).flatten())


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.packer.close()


def test_units_are_packed_in_order_as_far_as_the_window_goes(place: Place) -> None:
    assert len(UNITS) == 6
    answer = place.packed(WINDOW)
    assert (answer.first, answer.failure) == (0, None)
    place.until_free(NUM_BUFFERS - WINDOW)
    for unit, address in enumerate(answer.places):
        place.assert_holds(address, unit)


def test_a_unit_is_the_readers_until_it_says_that_it_has_it(place: Place) -> None:
    before = place.packed(WINDOW)
    assert place.ask() == before, "however often it asks"
    after = place.packed(WINDOW, done=1)
    assert (after.first, after.places[:-1]) == (1, before.places[1:])
    place.assert_holds(after.places[-1], WINDOW)
    assert place.ask(done=0) == after, "a question that was late changes nothing"


def test_all_units_come_and_all_memory_is_free_again(place: Place) -> None:
    for done in range(len(UNITS)):
        answer = place.packed(min(WINDOW, len(UNITS) - done), done=done)
        place.assert_holds(answer.places[0], done)
    assert place.ask(done=len(UNITS)).places == []
    assert place.num_free == NUM_BUFFERS
    assert place.ask(done=0).places == [], "nothing is packed again"


def test_the_next_packing_of_a_part_ends_the_one_before(place: Place) -> None:
    place.packed(WINDOW)
    place.packed(WINDOW, number=1)
    place.until_free(NUM_BUFFERS - WINDOW)
    assert place.ask(number=0) == Packed(5, 0), "a question that was late"
    place.packed(1, part=1)
    place.until_free(0)


def test_rooms_take_turns(place: Place) -> None:
    """The second has a unit at once, and one more for each that the first has read."""
    place.packed(WINDOW)
    place.packed(NUM_BUFFERS - WINDOW, room=6)
    place.packer.end(5)
    place.packed(WINDOW, room=6)
    place.packer.end(5)
    place.packer.end(6)
    assert place.num_free == NUM_BUFFERS


def test_a_unit_that_is_being_packed_is_nobody_elses_though_its_room_has_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_packing, go_on = threading.Event(), threading.Event()
    pack = StagingBuffer.pack

    def slowly(buffer: StagingBuffer, rows: Sequence[torch.Tensor], pieces: Sequence[Piece],
               own: torch.Tensor) -> None:  # fmt: skip
        is_packing.set()
        assert go_on.wait(10)
        pack(buffer, rows, pieces, own)

    monkeypatch.setattr(StagingBuffer, "pack", slowly)
    place.ask()
    assert is_packing.wait(10)
    place.packer.end(5)
    assert place.num_free == NUM_BUFFERS - 1
    go_on.set()
    place.until_free(NUM_BUFFERS)


def test_what_the_reader_has_needs_no_memory(place: Place) -> None:
    place.packed(WINDOW)
    place.packer.note_read(5, 0, len(PAGES) - 1)
    place.packer.note_read(5, 1, len(PAGES))
    place.until_free(NUM_BUFFERS - WINDOW)
    place.packer.note_read(5, 0, len(PAGES))
    assert place.num_free == NUM_BUFFERS
    assert place.ask().places == [], "a question that was late begins nothing"


def test_what_is_not_wanted_any_more_is_not_packed(place: Place) -> None:
    place.packed(WINDOW)
    assert place.ask(done=len(UNITS)).places == []
    place.until_free(NUM_BUFFERS)


@pytest.mark.parametrize("what", [(StagingBuffer, "pack"), (Staging, "take")])
def test_a_packing_that_fails_says_why_and_the_next_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: tuple[type, str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(*what, fail)
        assert wait_until(lambda: place.ask().failure is not None, 60, interval=0.002)
    assert place.ask().failure == "packing pages failed: RuntimeError: no memory"
    place.until_free(NUM_BUFFERS)
    place.packed(WINDOW, number=1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_pages": 8}, "pages were to be packed that are not computed"),
        ({"buffers": [1000, 3000]}, "pages of unknown buffers were to be packed"),
        ({"buffers": []}, "pages of unknown buffers were to be packed"),
        ({"unit_bytes": 23}, "pages of 24 bytes were to be packed into units of 23"),
        ({"unit_bytes": 65}, "pages of 24 bytes were to be packed into units of 65"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    place: Place, fields: dict[str, object], why: str
) -> None:
    asked = msgspec.structs.replace(FIRST, **fields)
    assert place.packer.ask(asked, PAGES) == Packed(5, 0, failure=why)
    assert place.num_free == NUM_BUFFERS

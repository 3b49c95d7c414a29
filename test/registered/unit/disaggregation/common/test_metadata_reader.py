"""Metadata of a prompt, read from its row: verified, and sent inline if it cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from rigs.disaggregation.desk_rig import until
from rigs.disaggregation.prompt_scene import LONG_TIMEOUTS, ROOM, TOKEN, Prompt, Scene
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.metadata_reader import ROW_BYTES, MetadataReader
from sglang.srt.disaggregation.control.protocol import RowsLayout
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    PeerUnreachable,
    Transfer,
    TransferError,
)
from sglang.srt.messages.first_token import FirstToken
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

NUM_ROWS, ROW = 4, 2
HERE = "this host"
OTHER = FirstToken(token_id=8, prompt_len=9, prompt_digest="d")


def is_row(blocks: Sequence[Block]) -> bool:
    return [block.length for block in blocks] == [ROW_BYTES]


class RowScene(Scene):
    """A scene whose prefill server has `TOKEN` in a row, and whose decode server reads rows."""

    def __init__(self, host: str = "", row_bytes: int = ROW_BYTES) -> None:
        self.theirs = MetadataBuffers(NUM_ROWS, torch.device("cpu"))
        self.own = MetadataBuffers(1, torch.device("cpu"))
        self.reader = MetadataReader(self.own, HERE)
        super().__init__(rows=RowsLayout(self.theirs.address(0), row_bytes, NUM_ROWS, host))

    def begin(self, own_pages: Sequence[int], *args: Any, **fields: Any) -> Prompt:
        return super().begin(own_pages, *args, **{"metadata": self.reader, **fields})

    def complete(self, pages: Sequence[int] = (4,), row: int = ROW, room: int = ROOM) -> None:
        self.prefill.open(room, pages)
        self.theirs.set_buf(ROW, room, TOKEN)
        self.prefill.complete(room, TOKEN, row)

    @property
    def row_reads(self) -> list[Transfer]:
        return [transfer for transfer in self.mover.begun if is_row(transfer.blocks)]

    def assert_row_is_free(self) -> None:
        row = self.own.alloc()
        assert row == 0
        self.own.free(row)


@pytest.fixture
def scene() -> Iterator[RowScene]:
    scene = RowScene()
    yield scene
    scene.close()


def bytes_by_way(prompt: Prompt) -> tuple[int, int]:
    """Told, and read."""
    aux_bytes = prompt.get_transfer_metric().aux_bytes
    return aux_bytes["control"], aux_bytes["transport"]


INLINE = (len(msgspec.msgpack.encode(TOKEN)), 0)
READ = (0, ROW_BYTES)


# ---- read --------------------------------------------------------------------------------------


def test_what_is_read_is_not_sent_inline(scene: RowScene) -> None:
    scene.complete()
    scene.prefill._rooms[ROOM].metadata = OTHER  # An inline answer would have this.
    prompt = scene.end(scene.begin([9]))
    assert (prompt.outcome, bytes_by_way(prompt)) == (TOKEN, READ)
    # Last of all, and no part of the pages.
    assert [is_row(transfer.blocks) for transfer in scene.mover.begun] == [False, True]
    page = sum(block.length for block in scene.mover.begun[0].blocks)
    assert prompt.get_transfer_metric().transfer_total_bytes == page
    assert scene.prefill.outcome(ROOM) == ""
    scene.assert_row_is_free()


def test_a_prompt_that_is_there_needs_the_row_alone(scene: RowScene) -> None:
    scene.complete([4, 5])
    prompt = scene.end(scene.begin([], first_page=2))
    assert (prompt.outcome, bytes_by_way(prompt)) == (TOKEN, READ)
    assert len(scene.mover.begun) == 1 and prompt.get_transfer_metric().transfer_total_bytes == 0


def test_metadata_without_a_row_is_sent_inline(scene: RowScene) -> None:
    """Too long for one: no failure, and the next prompt is read again."""
    scene.prefill.open(ROOM, [4])
    scene.prefill.complete(ROOM, TOKEN)
    found = scene.end(scene.begin([9]))
    assert (found.outcome, bytes_by_way(found)) == (TOKEN, INLINE)
    scene.complete(room=6)
    assert bytes_by_way(scene.end(scene.begin([9], room=6))) == READ


def test_a_prompt_waits_for_a_row_to_read_into(scene: RowScene) -> None:
    taken = scene.own.alloc()
    assert taken == 0
    scene.complete()
    prompt = scene.begin([9])
    until(lambda: len(scene.mover.begun) == 1)
    assert scene.row_reads == [] and not prompt.has_ended
    scene.own.free(taken)
    assert scene.end(prompt).outcome == TOKEN


def test_no_row_to_read_into_in_time(scene: RowScene) -> None:
    taken = scene.own.alloc()
    scene.complete()
    timeouts = Timeouts(unknown_room=60, waiting=0.3, silence=30)
    failure = scene.failure(scene.begin([9], timeouts=timeouts))
    assert failure == "no row for metadata was free in 0.3 s" == scene.given_up()
    assert taken == 0


# ---- verified ----------------------------------------------------------------------------------


def tear(scene: RowScene) -> None:
    scene.theirs._rows[ROW, 30] ^= 1


def renew(scene: RowScene) -> None:
    scene.theirs.set_buf(ROW, 77, TOKEN)


def empty(scene: RowScene) -> None:
    scene.theirs.clear(ROW)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(tear, "is torn"), (renew, "is stale: it was written for room 77, not for 5"), (empty, "emp")],
    ids=["torn", "stale", "empty"],
)
def test_a_wrong_row_fails_the_prompt(
    scene: RowScene, spoil: Callable[[RowScene], None], why: str
) -> None:
    scene.complete()
    spoil(scene)
    failure = scene.failure(scene.begin([9]))
    assert failure.startswith("reading the metadata from the prefill server failed: the row ")
    assert why in failure and scene.given_up() == failure
    scene.assert_row_is_free()


@pytest.mark.parametrize("row", [-1, NUM_ROWS, 2**40])
def test_a_row_that_does_not_exist_is_not_read(scene: RowScene, row: int) -> None:
    scene.complete(row=row)
    assert f"there is no row {row} among 4" in scene.failure(scene.begin([9]))
    assert scene.row_reads == []
    scene.assert_row_is_free()


def test_a_read_that_moves_nothing_is_noticed(
    scene: RowScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same room was read before: its words are not taken for what comes now."""
    scene.complete()
    assert scene.end(scene.begin([9])).outcome == TOKEN
    scene.prefill.end(ROOM)
    scene.prefill.forget(ROOM)
    move = scene.mover.move
    monkeypatch.setattr(
        scene.mover, "move", lambda peer, blocks: is_row(blocks) or move(peer, blocks)
    )
    scene.complete()
    assert "the row is empty" in scene.failure(scene.begin([9]))


# ---- found, since it cannot be read -------------------------------------------------------------


def refuse_rows(blocks: Sequence[Block]) -> TransferError | None:
    return PeerUnreachable("p", "maps no such memory") if is_row(blocks) else None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "metadata of" in one.getMessage()]


def test_rows_that_the_transport_does_not_move_are_sent_inline_with_one_warning(
    scene: RowScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.mover.fails = refuse_rows
    rooms = (5, 6, 7)
    with caplog.at_level(logging.WARNING):
        for room in rooms:
            scene.complete(room=room)
            prompt = scene.end(scene.begin([9], room=room))
            assert prompt.outcome == TOKEN
            assert bytes_by_way(prompt) == INLINE
    assert len(scene.row_reads) == 1, "it is not tried again"
    (warning,) = warnings_of(caplog)
    assert warning == (
        "metadata of the prefill server at host:1 comes over the control connection (TCP), not "
        "over the transport of the pages: peer p maps no such memory"
    )
    scene.assert_row_is_free()


def test_pages_that_the_transport_does_not_move_fail_the_prompt(scene: RowScene) -> None:
    scene.mover.fails = lambda blocks: PeerUnreachable("p", "is gone")
    scene.complete()
    assert "peer p is gone" in scene.failure(scene.begin([9]))
    assert scene.row_reads == []


def test_a_row_that_the_transport_never_lets_go_of(scene: RowScene) -> None:
    """The row is lost; the prompt and its pages are not."""
    scene.complete()
    scene.mover.hold = True
    prompt = scene.begin([9])
    until(lambda: bool(scene.mover.begun))
    scene.mover.finish(scene.mover.begun[0])
    until(lambda: bool(scene.row_reads))
    scene.row_reads[0].leave(TransferError("peer p ended"))
    assert scene.end(prompt).outcome == TOKEN
    assert prompt.has_ended and bytes_by_way(prompt) == INLINE
    assert scene.own.alloc() is None


def test_a_row_in_flight_is_nobodys_when_the_prompt_is_aborted(scene: RowScene) -> None:
    scene.complete([4, 5])
    scene.mover.hold = True
    prompt = scene.begin([], first_page=2)
    until(lambda: bool(scene.row_reads))
    prompt.cancel()
    until(lambda: isinstance(prompt.outcome, str))
    assert not prompt.has_ended and scene.own.alloc() is None
    scene.mover.release()
    scene.failure(prompt)
    scene.assert_row_is_free()


@pytest.mark.parametrize("host", [HERE, ""])
def test_rows_of_this_host_and_rows_that_are_in_reach_are_read(host: str) -> None:
    scene = RowScene(host)
    try:
        scene.complete()
        assert bytes_by_way(scene.end(scene.begin([9]))) == READ
    finally:
        scene.close()


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        ({"host": "another"}, "it is on another host, which NVLink within a node does not reach"),
        ({"row_bytes": 64}, "its rows have 64 bytes, those here 4096"),
    ],
)
def test_rows_out_of_reach_are_sent_inline_with_one_warning(
    offered: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = RowScene(**offered)
    try:
        with caplog.at_level(logging.WARNING):
            for room in (5, 6):
                scene.complete(room=room)
                prompt = scene.end(scene.begin([9], room=room))
                assert (prompt.outcome, bytes_by_way(prompt)) == (TOKEN, INLINE)
        assert scene.row_reads == []
        (warning,) = warnings_of(caplog)
        assert warning.endswith(f"the pages: {why}")
    finally:
        scene.close()


def test_without_rows_metadata_come_inline(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    reader = MetadataReader(MetadataBuffers(1, torch.device("cpu")), HERE)
    try:
        scene.prefill.open(ROOM)
        scene.prefill.complete(ROOM, TOKEN)
        with caplog.at_level(logging.WARNING):
            prompt = scene.end(scene.begin([], metadata=reader, timeouts=LONG_TIMEOUTS))
        assert bytes_by_way(prompt) == INLINE
        (warning,) = warnings_of(caplog)
        assert "it has no rows" in warning
    finally:
        scene.close()


def test_a_decode_server_without_rows_gets_it_inline(
    scene: RowScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.complete()
    with caplog.at_level(logging.WARNING):
        prompt = scene.end(scene.begin([9], metadata=MetadataReader()))
    assert (prompt.outcome, bytes_by_way(prompt)) == (TOKEN, INLINE)
    assert warnings_of(caplog) == [], "that is what it was asked for"

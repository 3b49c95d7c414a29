"""A row of metadata: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import random

import pytest

from sglang.srt.disaggregation.common.metadata_reader import (
    HEAD_BYTES,
    ROW_BYTES,
    BadRow,
    pack_row,
    unpack_row,
)
from sglang.srt.managers.tokenizer.request_limits import MAX_TOP_LOGPROBS
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.messages.io_struct import CachedTokensDetails
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

ROOM = 2**63 - 7
FEW = FirstToken(token_id=7, prompt_len=9, prompt_digest="d")
ALL = FirstToken(
    token_id=151_935,
    prompt_len=131_072,
    prompt_digest="f" * 16,
    sampling_digest="e" * 16,
    logprob=-1 / 3,
    top_logprobs=[(-0.1 - n / 3, 151_935 - n) for n in range(MAX_TOP_LOGPROBS)],
    cached=CachedTokensDetails(device=1, host=2, storage=3, storage_backend="MooncakeStore"),
    state_slot=5,
    queue_seconds=0.25,
    prefill_seconds=1.5,
)
NO_TOKEN = FirstToken(token_id=None, prompt_len=1, prompt_digest="")


def row_of(words: FirstToken, room: int = ROOM, *, before: bytes = b"") -> bytes:
    """A whole row, which had `before` in it."""
    raw = pack_row(room, words, ROW_BYTES)
    assert raw is not None
    return (raw + before[len(raw) :]).ljust(ROW_BYTES, b"\0")


@pytest.mark.parametrize("words", [FEW, ALL, NO_TOKEN], ids=["few", "all", "no token"])
@pytest.mark.parametrize("room", [0, 1, ROOM, 2**64 - 1])
def test_what_was_written_is_read(words: FirstToken, room: int) -> None:
    assert unpack_row(row_of(words, room), room) == words


def test_what_an_earlier_room_left_behind_it_does_not_matter() -> None:
    assert unpack_row(row_of(FEW, before=row_of(ALL, 3)), ROOM) == FEW


def test_metadata_that_is_too_long_has_no_row() -> None:
    words = FirstToken(token_id=1, prompt_len=1, prompt_digest="d" * 4000)
    assert pack_row(ROOM, words, ROW_BYTES) is None
    assert pack_row(ROOM, words, 2 * ROW_BYTES) is not None


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(BadRow, match=r"reading the metadata from .* failed: the row is empty"):
        unpack_row(bytes(ROW_BYTES), 0)


def test_a_stale_row_is_refused() -> None:
    with pytest.raises(BadRow, match=r"stale: it was written for room 4, not for 5"):
        unpack_row(row_of(FEW, 4), 5)


@pytest.mark.parametrize("words", [FEW, ALL], ids=["few", "all"])
def test_each_byte_counts(words: FirstToken) -> None:
    """One that differs, anywhere."""
    row = row_of(words)
    used = len(pack_row(ROOM, words, ROW_BYTES) or b"")
    for at in {*range(HEAD_BYTES + 40), *range(HEAD_BYTES, used, 37), used - 1}:
        torn = bytearray(row)
        torn[at] ^= 0x10
        with pytest.raises(BadRow):
            unpack_row(bytes(torn), ROOM)


def test_mixed_and_partial_rows_are_torn() -> None:
    """The head of one, and what follows of another; and a row that has come in part."""
    other = FirstToken(token_id=8, prompt_len=9, prompt_digest="d")
    row, there = row_of(FEW), row_of(other)
    with pytest.raises(BadRow, match="torn"):
        unpack_row(row[:HEAD_BYTES] + there[HEAD_BYTES:], ROOM)
    with pytest.raises(BadRow, match="torn"):
        unpack_row(row_of(ALL)[:1000] + bytes(ROW_BYTES - 1000), ROOM)


def test_metadata_of_another_room_is_not_that_of_this_one() -> None:
    """Though all but the room's number were right."""
    row = row_of(FEW, 4)
    with pytest.raises(BadRow, match="torn"):
        unpack_row((5).to_bytes(8, "little") + row[8:], 5)


def test_noise_is_never_taken_for_metadata() -> None:
    rng = random.Random(1)
    for _ in range(300):
        noise = (5).to_bytes(8, "little") + rng.randbytes(ROW_BYTES - 8)
        with pytest.raises(BadRow):
            unpack_row(noise, 5)

"""Rows that GPUs send one another inside a kernel, each number with the turn that it belongs to.

A rank writes its row into an inbox on each peer, as words of 64 bits: 32 bits of the row and the
number of the turn. The peer reads until every word has that number. So nothing is sent but the row
itself, in one trip over the link, and no fence waits for it; it takes twice the bytes.

Each row of an inbox has a counter of turns, the same on all ranks, and two places that take turns:
a rank that writes the next turn but one has had the next one from every peer, and so each of them
has read this one.

Source: NCCL's "LL" protocol, as Hu et al. describe it ("Demystifying NCCL", 2025, section 3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.distributed.tensor_group import INBOX_ROW_BYTES, INBOX_ROWS

_ROWS: tl.constexpr = tl.constexpr(INBOX_ROWS)
_ROW_WORDS: tl.constexpr = tl.constexpr(INBOX_ROW_BYTES // 8)


@triton.jit
def turns_of(
    memories: tl.tuple, inbox: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr
) -> tl.tensor:
    """Counters of this rank's rows: pointer to int32."""
    begin = memories[RANK] + inbox + 2 * RANKS * _ROWS * _ROW_WORDS * 8
    return begin.to(tl.pointer_type(tl.int32))


@triton.jit
def _words_of(
    memory: tl.tensor, inbox: tl.tensor, turn: tl.tensor, sender: tl.constexpr, row: tl.tensor,
    RANKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where a sender's row of this turn is in one rank's memory: pointer to int64."""
    place = ((turn & 1) * RANKS + sender) * _ROWS + row
    # Declared as aligned: otherwise each word would be moved by itself.
    begin = tl.multiple_of((memory + inbox).to(tl.pointer_type(tl.int64)), 16)
    return begin + place.to(tl.int64) * _ROW_WORDS


@triton.jit
def send(
    memories: tl.tuple, inbox: tl.tensor, turn: tl.tensor, row: tl.tensor, words: tl.tensor,
    at: tl.tensor, inside: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Write int32 words of one row into the inboxes of all peers, `at` these places."""
    marked = (turn.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            to = _words_of(memories[peer], inbox, turn, RANK, row, RANKS)
            tl.store(to + at, marked, mask=inside, cache_modifier=".wt")


@triton.jit
def receive(
    memories: tl.tuple, inbox: tl.tensor, turn: tl.tensor, row: tl.tensor, at: tl.tensor,
    inside: tl.tensor, peer: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Wait for the words of a peer's row: int32."""
    own = _words_of(memories[RANK], inbox, turn, peer, row, RANKS) + at
    found = tl.load(own, mask=inside, other=0, volatile=True)
    while tl.sum((inside & ((found >> 32).to(tl.int32) != turn)).to(tl.int32), axis=0) > 0:
        found = tl.load(own, mask=inside, other=0, volatile=True)
    return found.to(tl.int32)

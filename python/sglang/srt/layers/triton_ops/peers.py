"""Exchange between GPUs inside a kernel: a barrier, and rows that are written into each other's
low-latency buffers.

The barrier: the programs with the same number on all GPUs wait for each other.
A flag is a counter. A program increments its flag on each peer, then waits for each peer's flag in
its own memory and decrements it. An increment needs no answer, so the barrier takes one trip over
the link. A rank that is ahead may increment for its next kernel before a slower rank has
decremented; otherwise all flags are 0 between two kernels.

The buffers: a rank writes its row into the buffer of each peer as 64-bit words: 32 bits of the row
and a sequence number. The peer polls until every word has the number that it expects. A row takes
one trip over the link, without a fence or a flag after it, but twice the bytes.

Each row of a buffer has a counter of sequence numbers, equal on all ranks, and two places that
alternate. A rank that writes number n + 2 has received number n + 1 from every peer, so each peer
has read number n, whose place is overwritten.

Source: NCCL's "LL" protocol, as Hu et al. describe it ("Demystifying NCCL", 2025, section 3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.distributed.tensor_group import LOW_LATENCY_ROW_BYTES, LOW_LATENCY_ROWS

_ROWS: tl.constexpr = tl.constexpr(LOW_LATENCY_ROWS)
_ROW_WORDS: tl.constexpr = tl.constexpr(LOW_LATENCY_ROW_BYTES // 8)


@triton.jit
def barrier(memories: tl.tuple, flags: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr) -> None:
    """Wait for the peers. Their earlier writes may be read afterwards.

    Args:
        memories: Address of each rank's memory.
        flags: Offset of the flags in it, in bytes.
    """
    first = tl.program_id(0) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = (memories[peer] + flags).to(tl.pointer_type(tl.int32)) + first + RANK
            tl.atomic_add(theirs, 1, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            own = (memories[RANK] + flags).to(tl.pointer_type(tl.int32)) + first + peer
            while tl.atomic_add(own, 0, sem="acquire", scope="sys") < 1:
                pass
            tl.atomic_add(own, -1, sem="relaxed", scope="sys")


@triton.jit
def sequence_numbers(
    memories: tl.tuple, buffer: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr
) -> tl.tensor:
    """Counters of this rank's rows: pointer to int32."""
    begin = memories[RANK] + buffer + 2 * RANKS * _ROWS * _ROW_WORDS * 8
    return begin.to(tl.pointer_type(tl.int32))


@triton.jit
def _words_of(
    memory: tl.tensor, buffer: tl.tensor, number: tl.tensor, sender: tl.constexpr, row: tl.tensor,
    RANKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Place of a sender's row with this number in one rank's memory: pointer to int64."""
    place = ((number & 1) * RANKS + sender) * _ROWS + row
    # Declared as aligned; otherwise each word would be moved separately.
    begin = tl.multiple_of((memory + buffer).to(tl.pointer_type(tl.int64)), 16)
    return begin + place.to(tl.int64) * _ROW_WORDS


@triton.jit
def send(
    memories: tl.tuple, buffer: tl.tensor, number: tl.tensor, row: tl.tensor, words: tl.tensor,
    at: tl.tensor, inside: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Write int32 words of one row into the buffers of all peers, `at` these places."""
    marked = (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            to = _words_of(memories[peer], buffer, number, RANK, row, RANKS)
            tl.store(to + at, marked, mask=inside, cache_modifier=".wt")


@triton.jit
def receive(
    memories: tl.tuple, buffer: tl.tensor, number: tl.tensor, row: tl.tensor, at: tl.tensor,
    inside: tl.tensor, peer: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Poll until a peer's row is complete, and return its words: int32."""
    own = _words_of(memories[RANK], buffer, number, peer, row, RANKS) + at
    found = tl.load(own, mask=inside, other=0, volatile=True)
    while tl.sum((inside & ((found >> 32).to(tl.int32) != number)).to(tl.int32), axis=0) > 0:
        found = tl.load(own, mask=inside, other=0, volatile=True)
    return found.to(tl.int32)

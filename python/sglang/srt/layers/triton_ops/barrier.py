"""A barrier inside a kernel: the programs with the same number on all GPUs wait for each other.

A flag is a counter. A program increments its flag on each peer, then waits for each peer's flag in
its own memory and decrements it. An increment needs no answer, so the barrier takes one trip over
the link. A rank that is ahead may increment for its next kernel before a slower rank has
decremented; otherwise all flags are 0 between two kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


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

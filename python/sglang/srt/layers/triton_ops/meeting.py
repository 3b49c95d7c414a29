"""Programs with the same number on all GPUs wait for each other, inside a kernel.

A flag counts: a program adds one to its flag at each peer, and takes one from its own flag of each
peer once it is there. Telling does not wait for an answer from the other GPU, so that a meeting
takes one way over the link. A rank that is ahead may tell of its next kernel before a slower one
has taken the last count. Between two kernels all flags are 0 but for that.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def meet(memories: tl.tuple, flags: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr) -> None:
    """What peers have written before their kernels may be read from here on.

    Args:
        memories: Where each rank's memory begins.
        flags: Bytes from there to the flags.
    """
    first = tl.program_id(0) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            told = (memories[peer] + flags).to(tl.pointer_type(tl.int32)) + first + RANK
            tl.atomic_add(told, 1, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            own = (memories[RANK] + flags).to(tl.pointer_type(tl.int32)) + first + peer
            while tl.atomic_add(own, 0, sem="acquire", scope="sys") < 1:
                pass
            tl.atomic_add(own, -1, sem="relaxed", scope="sys")

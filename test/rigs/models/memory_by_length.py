"""Memory that prompts of new lengths leave allocated, printed in MB. A process of its own, because
libraries read their limits once.

    python -m rigs.models.memory_by_length CHECKPOINT WARM_FROM FROM TO
"""

from __future__ import annotations

import ctypes
import sys

from rigs.models.tiny_models import StepDriver


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_mb() -> float:
    """MB (10^6 bytes) that this process has allocated with `malloc` and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 1e6


def grown_by(checkpoint: str, warm: range, lengths: range) -> float:
    """MB that prompts of `lengths` leave allocated, after prompts of `warm`."""
    driver = StepDriver(checkpoint, dtype="bfloat16", pool_tokens=2 * lengths[-1])

    def run(length: int) -> None:
        driver.extend([(0, [1] * length)])
        row = driver.runner.req_to_token_pool.req_to_token[0, :length]
        driver.runner.token_to_kv_pool_allocator.free(row.long())
        driver.lens[0] = 0

    for length in warm:
        run(length)
    before = allocated_mb()
    for length in lengths:
        run(length)
    return allocated_mb() - before


if __name__ == "__main__":
    first, start, end = map(int, sys.argv[2:])
    print(grown_by(sys.argv[1], range(first, start), range(start, end)))

"""What may fail on one rank while a server starts: it happens on all ranks or on none.

Memory is real: a machine may have too little of it for one rank and enough for another. While a
server runs, its ranks agree at each tick. Before the first tick they agree here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch
import xxhash

from sglang.srt.distributed.rank_group import RankGroup, gather_texts

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_REASON_BYTES: Final = 1024
_ABSENT: Final = torch.iinfo(torch.int64).max

T = TypeVar("T")


class OtherRankFailed(ValueError):
    """This rank could do it, another one could not. Names that rank and its reason."""


def on_every_rank(
    group: RankGroup, make: Callable[[], T], discard: Callable[[T], object] = lambda _: None
) -> T:
    """`make()`, if it succeeds on all ranks. A collective; the scheduler's thread.

    Args:
        group: The ranks.
        make: May raise any `Exception`.
        discard: Undoes what `make` has made where another rank failed.

    Raises:
        Exception: What `make` raised here.
        OtherRankFailed: It raised on another rank; `discard` has been called.
    """
    error: Exception | None = None
    made: list[T] = []
    try:
        made.append(make())
    except Exception as raised:  # noqa: BLE001 - told to all ranks, and raised below
        error = raised
    if group.reduce_min(torch.tensor([int(error is None)])).item():
        return made[0]
    reason = "" if error is None else " ".join(str(error).split()) or type(error).__name__
    reasons = gather_texts(group, reason, _MAX_REASON_BYTES)
    if error is not None:
        raise error
    discard(made.pop())
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
    raise OtherRankFailed("; ".join(failed))


def ranks_on_this_machine(group: RankGroup) -> int:
    """How many of the ranks share this rank's memory, itself included. A collective."""
    try:
        machine = _BOOT_ID.read_bytes()
    except OSError:
        machine = b""  # No Linux: one machine.
    machines = torch.full((group.size,), _ABSENT, dtype=torch.int64)
    machines[group.rank] = xxhash.xxh3_64_intdigest(machine) >> 1
    return int((group.reduce_min(machines) == machines[group.rank]).sum())

"""Steps of a start that succeed on every rank or on none.

A rank that fails alone would leave the others waiting for it in their next collective. Therefore
the ranks exchange their errors at the end of each step that can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.mem_cache.storage.types import StorageUnavailable

MOST_REASON_BYTES: Final = 1024
"""Most bytes of one rank's reason in UTF-8; the rest is cut off."""

T = TypeVar("T")


def on_all_ranks(
    ranks: RankGroup, work: Callable[[], T], discard: Callable[[T], object] = lambda _: None
) -> T:
    """Run `work` on all ranks; return its result on this rank if it has succeeded on all. A
    collective.

    If there is one rank, this is `work()`, exceptions included.

    Args:
        work: Step of this rank; may raise any `Exception`.
        discard: Undoes the result of `work` on this rank if it failed on another.

    Raises:
        ValueError: `work` failed on at least one rank. The text is the same on all ranks: it names
            the failed ranks and their reasons. On a failed rank its cause is the exception.
    """
    if ranks.size == 1:
        return work()
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as raised:  # noqa: BLE001 - every rank raises it below
        error = raised
    why = reasons(gather_texts(ranks, "" if error is None else reason(error), MOST_REASON_BYTES))
    if why:
        for made in result:
            discard(made)
        raise ValueError(why) from error
    return result[0]


def reason(error: BaseException) -> str:
    """One line that describes the error; never empty."""
    text = " ".join(str(error).split())
    if text and isinstance(error, ValueError | StorageUnavailable):
        return text
    return f"{type(error).__name__}: {text}"


def reasons(texts: Sequence[str]) -> str:
    """The reasons of all ranks in one line; "" if no rank has one.

    Args:
        texts: Errors by rank; "" for a rank that did not fail.
    """
    return "; ".join(
        f"rank {rank} of {len(texts)}: {text}" for rank, text in enumerate(texts) if text
    )

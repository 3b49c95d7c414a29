"""Steps of a start that succeed on every rank or on none.

A rank that fails alone would leave the others waiting for it in their next collective. So each step
that can fail ends with the reasons of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.mem_cache.storage.types import StorageUnavailable

MOST_REASON_BYTES: Final = 1024
"""Length of one rank's reason in UTF-8; the rest is cut off."""

T = TypeVar("T")


def on_all_ranks(
    ranks: RankGroup, work: Callable[[], T], discard: Callable[[T], object] = lambda _: None
) -> T:
    """What `work` returns on this rank, once it has succeeded on all. A collective.

    With one rank this is `work()`, with the exceptions of that.

    Args:
        ranks: All of them.
        work: May raise any `Exception`.
        discard: Undoes what `work` has made here where it failed elsewhere.

    Raises:
        ValueError: It failed on some rank. On every rank the same text, which names the ranks that
            failed and their reasons; there the cause is the exception.
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
    """One line that says what went wrong; never empty."""
    text = " ".join(str(error).split())
    if text and isinstance(error, ValueError | StorageUnavailable):
        return text
    return f"{type(error).__name__}: {text}"


def reasons(texts: Sequence[str]) -> str:
    """The reasons of all ranks in one line, "" where none has one.

    Args:
        texts: Errors by rank; "" for a rank that did not fail.
    """
    return "; ".join(
        f"rank {rank} of {len(texts)}: {text}" for rank, text in enumerate(texts) if text
    )

"""Agreement of a server's ranks on the progress of requests whose other half is elsewhere.

Each rank talks to its own peers, so the ranks learn at different moments that a decode server asks
for a room, or that a prompt has been read. A vote is the progress of a request as one rank sees it.
The least vote of all ranks counts, so a single vote for `FAILED`, the lowest, fails the request on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash

from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged, gather_texts

FAILED: Final = 0
SLOTS: Final = 512
"""Requests in one round: the vector has a fixed size, since unequal ones abort gloo. If more are
open, they take turns."""
_HEAD: Final = 2
_REASON_BYTES: Final = 512
"""Most bytes of one rank's reason, in UTF-8; the rest is cut off."""
_SEPARATOR: Final = "\x1f"


class Outcome(NamedTuple):
    """A new vote on which all ranks agree."""

    key: int
    vote: int
    why: str
    """Reason of a failure, from the first rank that has one."""


@dataclass(slots=True)
class _Item:
    seen: int
    """The vote of this rank."""
    agreed: int
    why: str = ""


class Votes:
    """Votes by key. Scheduler's thread; all ranks open and close the same keys in the same order.

    With one rank there are no collectives, and the cost does not grow with the number of open keys.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._items: dict[int, _Item] = {}
        self._changed: dict[int, None] = {}
        """Keys with a vote that `count` has not returned yet; only with one rank."""
        self._turn = 0

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank, whose votes count at once."""
        return self._group.size == 1

    def open(self, key: int, vote: int) -> None:
        """Open `key`, with `vote` as the vote of all ranks."""
        assert key not in self._items, f"{key} is open already"
        self._items[key] = _Item(vote, vote)

    def close(self, key: int) -> None:
        """Close `key`: there are no more votes on it. Idempotent."""
        self._items.pop(key, None)
        self._changed.pop(key, None)

    def see(self, key: int, vote: int, why: str = "") -> None:
        """Set this rank's vote on `key`. A key that is not open, or has failed, does not change.

        Args:
            why: Reason of a failure.
        """
        item = self._items.get(key)
        if item is None or item.seen == FAILED or item.seen == vote:
            return
        item.seen, item.why = vote, why
        self._changed[key] = None

    def count(self) -> Sequence[Outcome]:
        """Hold a round of votes; return the new outcomes. A collective, unless no key is open or
        there is one rank; a second collective if a request has failed.

        Raises:
            RanksDiverged: Another rank has other open keys.
        """
        if not self._items:
            return ()
        if self.is_alone:
            changed, self._changed = list(self._changed), {}
            return [self._agree(key, self._items[key].seen) for key in changed]
        keys = self._window()
        votes = self._least(keys)
        news = [(key, vote) for key, vote in votes if vote != self._items[key].agreed]
        outcomes = [self._agree(key, vote) for key, vote in news]
        failed = [key for key, vote in news if vote == FAILED]
        if not failed:
            return outcomes
        whys = dict(zip(failed, self._reasons(failed), strict=True))
        return [Outcome(one.key, one.vote, whys.get(one.key, "")) for one in outcomes]

    def _agree(self, key: int, vote: int) -> Outcome:
        item = self._items[key]
        item.agreed = vote
        return Outcome(key, vote, item.why)

    def _window(self) -> list[int]:
        keys = list(self._items)
        if len(keys) <= SLOTS:
            return keys
        begin = self._turn % len(keys)
        self._turn = begin + SLOTS
        return (keys[begin:] + keys[:begin])[:SLOTS]

    def _least(self, keys: list[int]) -> list[tuple[int, int]]:
        """The keys, each with the least vote of all ranks."""
        digest = xxhash.xxh3_64_intdigest(np.array(keys, dtype=np.uint64).tobytes()) >> 1
        vector = np.zeros(_HEAD + SLOTS, dtype=np.int64)
        vector[:_HEAD] = digest, -digest
        vector[_HEAD : _HEAD + len(keys)] = [self._items[key].seen for key in keys]
        least = self._group.reduce_min(torch.from_numpy(vector)).tolist()
        if least[0] != -least[1]:
            raise RanksDiverged("the ranks do not vote on the same requests")
        return list(zip(keys, least[_HEAD:], strict=False))

    def _reasons(self, failed: Sequence[int]) -> list[str]:
        """Reasons of failures, each from the first rank that has one, with its name. A
        collective."""
        own = [_cut(self._items[key].why) for key in failed]
        texts = gather_texts(self._group, _SEPARATOR.join(own), (_REASON_BYTES + 8) * len(failed))
        by_rank = [text.split(_SEPARATOR) for text in texts]
        return [_first(reasons) for reasons in zip(*by_rank, strict=True)]


def _cut(why: str) -> str:
    raw = why.replace(_SEPARATOR, " ").encode()[:_REASON_BYTES]
    return raw.decode(errors="ignore")


def _first(reasons: Sequence[str]) -> str:
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")

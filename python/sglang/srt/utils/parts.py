"""Long work in small parts, so that a caller can look for messages between two of them.

Counts say where a part ends, not time, so that ranks with equal states do equal parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

Parts: TypeAlias = Iterator[None]
"""A generator: each `next` does a part of the work, well below a millisecond."""

MOST_ITEMS: Final = 4096
"""Items of a part, such as tokens or pages that numpy looks at. A node of a tree, at which Python
looks, counts as `NODE_ITEMS`."""
NODE_ITEMS: Final = 512


class Meter:
    """Says when a part has done enough."""

    def __init__(self) -> None:
        self._left = MOST_ITEMS

    def spend(self, items: int) -> bool:
        """Count work on `items`. True: the part ends here."""
        self._left -= items
        if self._left > 0:
            return False
        self._left = MOST_ITEMS
        return True


def slices(length: int) -> Iterator[slice]:
    """`length` items in order, at most `MOST_ITEMS` in each slice."""
    return (slice(at, at + MOST_ITEMS) for at in range(0, length, MOST_ITEMS))


def do_all(parts: Parts) -> None:
    """Do all parts at once."""
    deque(parts, maxlen=0)

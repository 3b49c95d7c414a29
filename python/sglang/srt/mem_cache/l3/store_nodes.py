"""The nodes that lend memory to a store: which serve, and which are gone.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

_FORGET_S: Final = 3600.0
"""Seconds for which a node that is gone is told: it may never come back under its name."""
_MAX_NODES: Final = 256
_ABSENT: Final = 2
"""Answers in a row that lack a node that is gone: a master that was restarted names no node until
they have reported to it."""


@dataclass(slots=True)
class _Node:
    seen: float
    """Time of the last answer that named it."""
    absent: int = 0
    """Answers since then."""


class StoreNodes:
    """The nodes that a store has named. Each node that is gone is logged once, and so is each that
    has another transport."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._unlike: tuple[str, ...] = ()

    def update(self, named: Sequence[str], now: float) -> None:
        """Note an answer at `now`, in seconds, which names the nodes that serve."""
        for name in named[:_MAX_NODES]:
            node = self._nodes.setdefault(name, _Node(now))
            if node.absent >= _ABSENT:
                logger.info("store node %s is back", name)
            node.seen, node.absent = now, 0
        for name in self._nodes.keys() - set(named):
            node = self._nodes[name]
            node.absent += 1
            if node.absent == _ABSENT:
                logger.warning(
                    "store node %s is gone, and its objects with it: prompts that need them are "
                    "computed, and written again; %d nodes are left",
                    name,
                    len(named),
                )
        gone = sorted((node.seen, name) for name, node in self._nodes.items() if node.absent)
        excess = len(self._nodes) - _MAX_NODES
        for place, (seen, name) in enumerate(gone):
            if place < excess or now - seen > _FORGET_S:
                del self._nodes[name]

    def update_unlike(self, named: tuple[str, ...]) -> None:
        """Note an answer with the nodes that have another transport than this server."""
        for name in sorted(set(named[:_MAX_NODES]) - set(self._unlike)):
            logger.warning(
                "store node %s has another protocol than this server, so their transfers may fail: "
                "start both with the same MOONCAKE_PROTOCOL",
                name,
            )
        self._unlike = named[:_MAX_NODES]

    def serving(self) -> dict[str, bool]:
        """For each node, by name: False if it is gone."""
        return {name: node.absent < _ABSENT for name, node in sorted(self._nodes.items())}

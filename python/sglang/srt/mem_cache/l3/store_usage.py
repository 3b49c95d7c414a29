"""How full the attached store is: asked now and then, in a thread of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from sglang.srt.mem_cache.l3.store_nodes import StoreNodes
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import StorageUnavailable, StorageUsage
from sglang.srt.utils.background_call import BackgroundCall

logger = logging.getLogger(__name__)

_FRESH_S: Final = 10.0


class StoreUsage:
    """The last known usage of a store. Scheduler thread only; no call blocks.

    The store is asked when somebody wants to know it and ten seconds have passed; that answer comes
    with a later call. While a question hangs there is no second one. Failures in a row are logged
    once.

    Attributes:
        nodes: What the answers say about the store's nodes.
    """

    def __init__(self) -> None:
        self._known: StorageUsage | None = None
        self._question: BackgroundCall[StorageUsage | None] | None = None
        self._asked = -_FRESH_S
        self._has_failed = False
        self.nodes = StoreNodes()

    def latest(
        self, client: HiCacheStorage | None, clock: Callable[[], float] = time.monotonic
    ) -> StorageUsage | None:
        """Last answer of `client`, or None if it has not answered yet, cannot tell, or failed."""
        question, now = self._question, clock()
        if question is not None and question.ended:
            self._question = None
            self._known = None if question.error is not None else question.result
            if question.error is not None and not self._has_failed:
                logger.warning("L3 does not tell how full it is: %s", question.error)
            self._has_failed = question.error is not None
            if self._known is not None and self._known.nodes is not None:
                self.nodes.update(self._known.nodes, now)
                self.nodes.update_unlike(self._known.unlike_nodes)
        if self._question is None and client is not None and now - self._asked >= _FRESH_S:
            self._asked = now
            self._question = BackgroundCall(
                "hicache-usage", lambda: _ask(client), expected=(StorageUnavailable, TypeError)
            )
        return self._known


def _ask(client: HiCacheStorage) -> StorageUsage | None:
    usage = client.get_usage()
    if usage is not None and not isinstance(usage, StorageUsage):
        raise TypeError(
            f"{type(client).__name__}.get_usage answered a {type(usage).__name__}: return a "
            "StorageUsage or None"
        )
    return usage

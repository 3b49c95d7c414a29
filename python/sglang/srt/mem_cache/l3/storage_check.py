"""Checks whether L3 still has stored pages.

A stored page is not written again, and while it is in L1 or L2 it is not read either. So only this
check detects that the store was restarted, or has evicted pages.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.l3.storage_operation import CheckOperation
from sglang.srt.mem_cache.tree.ballot import Progress, Verdict
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.store_connection import StoreConnection

_CHECK_EVERY: Final = 61
"""Re-check L3 on every 61st use of a stored prompt. A count, not a time, so that all ranks check at
the same tick; a prime, so that prompts used in rotation all get a turn."""


class StorageCheck(TierFlow):
    """Checks of stored pages, one at a time.

    Args:
        page_size: Tokens of a page.
        store: The connection to L3.
    """

    def __init__(self, page_size: int, store: StoreConnection) -> None:
        self._page_size = page_size
        self._store = store
        self._under_way: CheckOperation | None = None
        self._uses = 0
        """Uses of stored prompts since the start."""

    def busy(self) -> dict[str, int]:
        return {} if self._under_way is None else {"checks": 1}

    def on_insert(self, path: list[TreeNode]) -> None:
        attached = self._store.attached
        if attached is None or not path or not self._store.has_stored(path[0]):
            return
        self._uses += 1
        is_due = self._uses % _CHECK_EVERY == 0
        if not is_due or self._under_way is not None or not self._store.available:
            return
        stored = list(itertools.takewhile(self._store.has_stored, path))
        while stored and any(state.host_value is None for state in stored[-1].states):
            # A stored prompt ends with its states; only those on the host are known to be in L3.
            stored.pop()
        hashes = [page for node in stored for page in node.page_hashes(self._page_size)]
        if not hashes:
            return
        self._under_way = CheckOperation(hashes, self._store.epoch)
        attached.reads.queue.put(self._under_way)

    def report(self, progress: Progress) -> None:
        if self._under_way is not None and self._under_way.outcome is not None:
            progress.check = Verdict.on(is_good=bool(self._under_way.outcome))

    def act_on(self, agreed: Progress) -> None:
        if (check := self._under_way) is not None and agreed.check is not Verdict.UNDER_WAY:
            self._under_way = None
            if agreed.check is Verdict.FAILED and check.epoch == self._store.epoch:
                self._store.forget_stored()

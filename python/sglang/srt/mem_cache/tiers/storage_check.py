"""Asks whether L3 still has what it had.

A page that it has is not written again, and while it is in L1 or L2 it is not read either: nothing
else would tell that the store was restarted, or has evicted it.

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
    from sglang.srt.mem_cache.tiers.storage_link import StorageLink

_CHECK_EVERY: Final = 61
"""Ask L3 on every 61st use of a stored prompt: counted and not timed, so that all ranks ask at the
same tick; a prime, so that prompts used in rotation all get a turn."""


class StorageCheck(TierFlow):
    """Questions whether stored pages are still there, one at a time.

    Args:
        page_size: Tokens.
        link: The way to L3.
        has_states: Prompts end with a recurrent state.
    """

    def __init__(self, page_size: int, link: StorageLink, *, has_states: bool = False) -> None:
        self._page_size = page_size
        self._link = link
        self._has_states = has_states
        self._under_way: CheckOperation | None = None
        self._uses = 0
        """Uses of stored prompts since the start."""

    def busy(self) -> dict[str, int]:
        return {} if self._under_way is None else {"checks": 1}

    def on_insert(self, path: list[TreeNode]) -> None:
        io = self._link.io
        if io is None or not path or not self._link.has_stored(path[0]):
            return
        self._uses += 1
        is_due = self._uses % _CHECK_EVERY == 0
        if not is_due or self._under_way is not None or not self._link.available:
            return
        stored = list(itertools.takewhile(self._link.has_stored, path))
        while self._has_states and stored and stored[-1].mamba_host_value is None:
            # A prompt is there up to a state, and L3 is known to have those that the host has.
            stored.pop()
        hashes = [page for node in stored for page in node.page_hashes(self._page_size)]
        if not hashes:
            return
        self._under_way = CheckOperation(hashes, self._link.epoch)
        io.submit_check(self._under_way)

    def report(self, progress: Progress) -> None:
        if self._under_way is not None and self._under_way.outcome is not None:
            progress.check = Verdict.on(is_good=bool(self._under_way.outcome))

    def act_on(self, agreed: Progress) -> None:
        if (check := self._under_way) is not None and agreed.check is not Verdict.UNDER_WAY:
            self._under_way = None
            if agreed.check is Verdict.FAILED and check.epoch == self._link.epoch:
                self._link.forget_stored()

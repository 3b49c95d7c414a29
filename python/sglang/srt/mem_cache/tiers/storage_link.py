"""State that all flows to and from L3 share: whether it may be asked, and its epoch.

Threads: the scheduler's only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.tree.tier_flow import TierFlow

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.storage_io import StorageIO
    from sglang.srt.mem_cache.tiers.hicache_administration import StorageAdministration
    from sglang.srt.mem_cache.tiers.hicache_attachment import StorageAttachment
    from sglang.srt.mem_cache.tree.ballot import Progress
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class StorageLink(TierFlow):
    """The way to L3, as all ranks agree on it.

    Args:
        attachment: What is attached, with which settings.
        administration: Changes of that at run time.

    Attributes:
        epoch: Counts up whenever L3 may have lost what it held. Pages written or read in an
            earlier epoch do not count as stored.
    """

    def __init__(
        self, attachment: StorageAttachment, administration: StorageAdministration
    ) -> None:
        self.attachment = attachment
        self.epoch = 0
        self._administration = administration
        self._answers = True
        self._seen_reconnects = self._agreed_reconnects = 0
        """How often L3 came back on this rank: as told to the others, and as agreed by all."""

    @property
    def io(self) -> StorageIO | None:
        """The threads of what is attached; None: nothing is."""
        return self.attachment.storage_io

    @property
    def available(self) -> bool:
        """Whether L3 may be asked for anything: no call is stuck on any rank, and no operator is
        changing it."""
        return self._answers and not self._administration.is_under_way

    def has_stored(self, node: TreeNode) -> bool:
        """Whether L3 has the pages of `node`, as far as is known."""
        return node.parent is None or node.storage_epoch == self.epoch

    def forget_stored(self) -> None:
        """L3 is another one, was cleared, or has lost pages: nothing counts as stored."""
        self.epoch += 1

    def is_active(self) -> bool:
        return not self._answers

    def report(self, progress: Progress) -> None:
        if self.io is not None:
            progress.available = self.io.available
            self._seen_reconnects = self.io.reconnects
            progress.has_reconnected = self._seen_reconnects != self._agreed_reconnects
            progress.rates = self.io.worth.rates()

    def act_on(self, agreed: Progress) -> None:
        self._answers = agreed.available
        if agreed.has_reconnected:
            self._agreed_reconnects = self._seen_reconnects
            self.forget_stored()

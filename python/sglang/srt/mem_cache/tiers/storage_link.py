"""State that all flows to and from L3 share: its availability, and its epoch.

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
    """State of the connection to L3, as all ranks agree on it.

    Args:
        attachment: The attached L3 and its settings.
        administration: Changes of L3 at run time.

    Attributes:
        epoch: Counter that is increased whenever L3 may have lost its objects. Pages written or
            read in an earlier epoch do not count as stored.
    """

    def __init__(
        self, attachment: StorageAttachment, administration: StorageAdministration
    ) -> None:
        self.attachment = attachment
        self.epoch = 0
        self._administration = administration
        self._answers = True
        self._seen_reconnects = self._agreed_reconnects = 0
        """Reconnects of L3 on this rank: as last reported in a ballot, and as agreed by all."""

    @property
    def io(self) -> StorageIO | None:
        """The threads of the attached L3; None: none is attached."""
        return self.attachment.storage_io

    @property
    def available(self) -> bool:
        """Whether calls to L3 are allowed: no call is stuck on any rank, and no change is under
        way."""
        return self._answers and not self._administration.is_under_way

    def has_stored(self, node: TreeNode) -> bool:
        """Whether L3 is believed to have the pages of `node`."""
        return node.parent is None or node.storage_epoch == self.epoch

    def forget_stored(self) -> None:
        """Mark all nodes as not stored: L3 is another one, was cleared, or has lost pages."""
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

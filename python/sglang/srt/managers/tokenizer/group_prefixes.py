"""The server process's knowledge of which pages each DP group's tree has."""

from __future__ import annotations

import logging
from array import array
from itertools import islice
from typing import Final

from sglang.srt.mem_cache.tree.radix_key import RadixKey, TokenArray, hash_str_to_int64
from sglang.srt.messages.io_struct import HeldPagesReport
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

_MOST_PAGES: Final = 2_000_000
"""Most pages that are known, in about 150 MB."""
_MOST_HASHED: Final = 2048
"""Most pages of a prompt that are looked up, in a few milliseconds."""


class GroupPrefixes:
    """Pages by group, as the groups' schedulers report them. Event loop thread only.

    Only reports let it grow. Each group has an equal share of `most_pages`; beyond it, new pages
    remain unknown until others leave: prefixes look shorter, and no beginning is forgotten.
    """

    def __init__(self, num_groups: int, page_size: int, most_pages: int = _MOST_PAGES) -> None:
        self.page_size = page_size
        self._most_of_group = most_pages // num_groups
        self._held: list[set[int]] = [set() for _ in range(num_groups)]
        self._log = RateLimitedLogger(logger)

    def apply(self, report: HeldPagesReport) -> None:
        """Note what a group's tree has got and lost."""
        if report.is_cleared:
            self._held[report.dp_rank] = set()
        held = self._held[report.dp_rank]
        held.difference_update(array("q", report.removed))
        stored = array("q", report.stored)
        room = self._most_of_group - len(held)
        if len(stored) > room:
            self._log.info(
                "full",
                "dp_rank %d has more than %d pages: requests are placed by fewer",
                report.dp_rank,
                self._most_of_group,
            )
        held.update(stored[: max(room, 0)])

    def lengths(self, tokens: TokenArray, extra_key: str | None) -> list[int]:
        """Tokens of the prompt's longest prefix in each group. The prompt is hashed once, and only
        as far as any group has it."""
        found = [0] * len(self._held)
        able = list(range(len(self._held)))
        length = 0
        hashes = RadixKey(tokens, extra_key).each_page_hash(self.page_size)
        for name in islice(hashes, _MOST_HASHED):
            page = hash_str_to_int64(name)
            still = [dp_rank for dp_rank in able if page in self._held[dp_rank]]
            if len(still) < len(able):
                for dp_rank in set(able).difference(still):
                    found[dp_rank] = length
                able = still
                if not able:
                    break
            length += self.page_size
        for dp_rank in able:
            found[dp_rank] = length
        return found

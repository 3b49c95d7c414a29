"""Measured costs of links, which decide whether pages are packed before they are read. Plain
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang.srt.constants import MIB

UNIT_BYTES: Final = 128 * MIB
"""Bytes of a unit of packed pages, which is read at once. Its read takes longer than the messages
about it, and a prompt of thousands of tokens has several units, whose reads overlap."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link on which packing may pay.

    Attributes:
        block_s: Seconds of overhead per block.
        bytes_per_s: Bandwidth of one large block, in bytes per second.
        packing_s: Seconds until the first unit is packed and its reader knows it, plus seconds
            after the last is read.
    """

    block_s: float
    bytes_per_s: float
    packing_s: float

    def direct_s(self, num_blocks: int, num_bytes: int) -> float:
        """Seconds to read blocks from pool to pool."""
        return num_blocks * self.block_s + num_bytes / self.bytes_per_s

    def packed_s(self, num_bytes: int, unit_bytes: int) -> float:
        """Seconds to read the same bytes packed into units."""
        return self.packing_s + self.direct_s(-(-num_bytes // unit_bytes), num_bytes)

    def packing_pays(self, num_blocks: int, num_bytes: int, unit_bytes: int) -> bool:
        """Whether packing `num_blocks` blocks is faster than reading them."""
        return self.packed_s(num_bytes, unit_bytes) < self.direct_s(num_blocks, num_bytes)


LINKS: Final[Mapping[str, LinkCosts]] = {
    # Two H200s (benchmark/results/2026-11-22-gpu-ranks.md): 9,216 blocks of 128 KB in 46 ms, 72 of
    # 16 MB in 4 ms, while a peer copy has 394 GB/s. `packing_s` is calculated: two copies of a unit
    # at 1.5 TB/s and two messages.
    "nvlink_intra": LinkCosts(block_s=5e-6, bytes_per_s=390e9, packing_s=0.4e-3),
}
"""Costs by protocol. Over other protocols blocks are queued, and pages are read from pool to
pool."""

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
        block_s: Seconds of overhead per block that is read from pool to pool.
        bytes_per_s: Bandwidth of one large block, in bytes per second.
        packing_s: Seconds until the first unit is packed and its reader knows it, plus seconds
            after the last is read.
        unit_s: Seconds of overhead per unit.
    """

    block_s: float
    bytes_per_s: float
    packing_s: float
    unit_s: float

    def direct_s(self, num_blocks: int, num_bytes: int) -> float:
        """Seconds to read blocks from pool to pool."""
        return num_blocks * self.block_s + num_bytes / self.bytes_per_s

    def packed_s(self, num_bytes: int, unit_bytes: int) -> float:
        """Seconds to read the same bytes packed into units."""
        num_units = -(-num_bytes // unit_bytes)
        return self.packing_s + num_units * self.unit_s + num_bytes / self.bytes_per_s

    def packing_pays(self, num_blocks: int, num_bytes: int, unit_bytes: int) -> bool:
        """True if packing `num_blocks` blocks is faster than reading them."""
        return self.packed_s(num_bytes, unit_bytes) < self.direct_s(num_blocks, num_bytes)


LINKS: Final[Mapping[str, LinkCosts]] = {
    # Two H200s (benchmark/results/2026-11-23-gpu-pd.md): 9,216 blocks of 128 KB in 46 to 58 ms, 72
    # of 16 MB in 4 ms, while a peer copy has 394 GB/s. Packed in units of 64 to 256 MiB, 1.2 GB
    # take 7.6 to 10.4 ms and 4.8 GB take 18 to 34 ms: this line fits all six within 15%.
    "nvlink_intra": LinkCosts(block_s=5e-6, bytes_per_s=390e9, packing_s=2.5e-3, unit_s=0.3e-3),
}
"""Costs by protocol. Over other protocols blocks are queued, and pages are read from pool to
pool."""

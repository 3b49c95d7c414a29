"""Whether pages are packed before they are read: what a link costs, measured. Plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang.srt.constants import MIB

UNIT_BYTES: Final = 128 * MIB
"""Packed pages that are read at once: a read of them takes longer than what the processes say
to each other meanwhile, and a prompt of thousands of tokens is several, which overlap."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link on which packing may pay.

    Attributes:
        block_s: Seconds that each block takes beside its bytes.
        bytes_per_s: Bytes per second of one large block.
        packing_s: Seconds until the first unit is packed and known, plus those after the last is
            read.
    """

    block_s: float
    bytes_per_s: float
    packing_s: float

    def direct_s(self, num_blocks: int, num_bytes: int) -> float:
        """Seconds to read blocks from pool to pool."""
        return num_blocks * self.block_s + num_bytes / self.bytes_per_s

    def packed_s(self, num_bytes: int, unit_bytes: int) -> float:
        """Seconds to read the same packed into units."""
        return self.packing_s + self.direct_s(-(-num_bytes // unit_bytes), num_bytes)

    def packing_pays(self, num_blocks: int, num_bytes: int, unit_bytes: int) -> bool:
        """Whether packing `num_blocks` blocks is faster than reading them."""
        return self.packed_s(num_bytes, unit_bytes) < self.direct_s(num_blocks, num_bytes)


LINKS: Final[Mapping[str, LinkCosts]] = {
    # Two H200s (benchmark/results/2026-11-22-gpu-ranks.md): 9,216 blocks of 128 KB in 46 ms, 72 of
    # 16 MB in 4 ms, while a peer copy has 394 GB/s. `packing_s` is what two copies of a unit at
    # 1.5 TB/s and two messages take by calculation.
    "nvlink_intra": LinkCosts(block_s=5e-6, bytes_per_s=390e9, packing_s=0.4e-3),
}
"""Costs by protocol. Over the others, whose blocks are queued, pages are read from pool to pool."""

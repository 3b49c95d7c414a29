"""State shared by all receivers of a rank: its place among the ranks, and the costs of its link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from sglang.srt.constants import MIB
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.sessions import Engine, Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.control.control_client import Timeouts, incompatible

MAX_SOURCES: Final = 64
"""Most ranks that one rank reads from. Each costs a thread and a connection for each prompt."""
UNIT_BYTES: Final = 128 * MIB
"""Bytes of a unit of packed pages, which is read at once. Its read takes longer than the messages
about it, and a prompt of thousands of tokens has several units, whose reads overlap."""
FindRank: TypeAlias = Callable[[str, int, int], Route]
"""Finds the route of a rank of a prefill server; arguments: host and port of its bootstrap server,
rank. Asks once and may take time; raises BootstrapError."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank of a server. Plain numbers.

    Both servers split the attention heads evenly, in the order of their ranks. A decode rank reads
    from each prefill rank whose range of heads overlaps its own. It polls all of them, even if
    several have the same bytes: each prefill rank has to know its readers, and when all have read.

    Attributes:
        num_ranks: Ranks of the server; a multiple of `attn_tp_size`.
        attn_tp_size: Number of ranks over which heads are split; see `RankGroup`.
    """

    rank: int = 0
    num_ranks: int = 1
    attn_tp_size: int = 1

    def partners(self, other: RankPlace) -> list[int]:
        """The ranks of the server of `other` that have heads in common with this rank, for any
        number of heads."""
        share, size = self.rank % self.attn_tp_size, self.attn_tp_size
        shares = [rank % other.attn_tp_size for rank in range(other.num_ranks)]
        return [
            rank
            for rank, there in enumerate(shares)
            if share * other.attn_tp_size < (there + 1) * size
            and there * size < (share + 1) * other.attn_tp_size
        ]


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
        return num_blocks * self.block_s + num_bytes / self.bytes_per_s

    def packed_s(self, num_bytes: int, unit_bytes: int) -> float:
        num_units = -(-num_bytes // unit_bytes)
        return self.packing_s + num_units * self.unit_s + num_bytes / self.bytes_per_s

    def packing_pays(self, num_blocks: int, num_bytes: int, unit_bytes: int) -> bool:
        return self.packed_s(num_bytes, unit_bytes) < self.direct_s(num_blocks, num_bytes)


LINKS: Final[Mapping[str, LinkCosts]] = {
    # Two H200s (benchmark/results/2026-11-23-gpu-pd.md): 9,216 blocks of 128 KB in 46 to 58 ms, 72
    # of 16 MB in 4 ms, while a peer copy has 394 GB/s. Packed in units of 64 to 256 MiB, 1.2 GB
    # take 7.6 to 10.4 ms and 4.8 GB take 18 to 34 ms: this line fits all six within 15%.
    "nvlink_intra": LinkCosts(block_s=5e-6, bytes_per_s=390e9, packing_s=2.5e-3, unit_s=0.3e-3),
}
"""Costs by protocol. Over other protocols blocks are queued, and pages are read from pool to
pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """State shared by all receivers of a rank. Any thread.

    Attributes:
        place: Place of this rank among those of the decode server.
        staging: Buffers for pages of ranks with other heads, and for packed pages.
        sessions: Sessions of all prefill servers; a session is kept while it may be read from.
        link: Costs that decide whether pages are packed; None: they are never packed.
    """

    place: RankPlace
    geometry: PoolGeometry
    engine: Engine
    staging: Staging
    checksums: RoomChecksums
    metadata: MetadataReader
    sessions: Sessions
    find_rank: FindRank
    timeouts: Timeouts
    secret: DeploymentSecret | None = None
    link: LinkCosts | None = None

    def sources_of(self, route: Route, where: str) -> list[int]:
        """The ranks of a prefill server that this rank reads from. Raises RoomFailed if this model
        cannot have such ranks, or they are too many."""
        num_ranks, attn_tp_size = route.num_ranks, route.attn_tp_size
        why = self.geometry.why_no_split(attn_tp_size)
        if num_ranks % attn_tp_size:
            why = f"its {num_ranks} ranks are no multiple of the {attn_tp_size} that split heads"
        if why is None:
            sources = self.place.partners(RankPlace(0, num_ranks, attn_tp_size))
            if len(sources) <= MAX_SOURCES:
                return sources
            why = (
                f"this rank would read from {len(sources)} of its ranks; the limit is {MAX_SOURCES}"
            )
        raise incompatible(where, why)

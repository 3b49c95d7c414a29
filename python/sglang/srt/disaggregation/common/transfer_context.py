"""State shared by all receivers of a rank; the mapping of decode ranks to prefill ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.control_connection import Timeouts, incompatible
from sglang.srt.disaggregation.common.engine import Engine
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.link_costs import LinkCosts
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret

MAX_SOURCES: Final = 64
"""Most ranks that one rank reads from. Each costs a thread and a connection for each prompt."""
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
        rank: Number of the rank, from 0.
        num_ranks: Ranks of the server; a multiple of `attn_tp_size`.
        attn_tp_size: Number of ranks over which heads are split; see `RankGroup`.
    """

    rank: int = 0
    num_ranks: int = 1
    attn_tp_size: int = 1

    def others(self) -> list[RankPlace]:
        """All ranks of the same server, this one included, in their order."""
        return [
            RankPlace(rank, self.num_ranks, self.attn_tp_size) for rank in range(self.num_ranks)
        ]

    def overlaps(self, other: RankPlace) -> bool:
        """True if the two ranks have heads in common, for any number of heads."""
        own, their = self.rank % self.attn_tp_size, other.rank % other.attn_tp_size
        return (
            own * other.attn_tp_size < (their + 1) * self.attn_tp_size
            and their * self.attn_tp_size < (own + 1) * other.attn_tp_size
        )

    def sources(self, prefill: RankPlace) -> list[RankPlace]:
        """The ranks of the server of `prefill` that this rank reads from."""
        return [one for one in prefill.others() if self.overlaps(one)]

    def readers(self, decode: RankPlace) -> list[int]:
        """The ranks of the server of `decode` that read from this rank."""
        return [one.rank for one in decode.others() if one.overlaps(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """State shared by all receivers of a rank. Any thread.

    Attributes:
        place: Place of this rank among those of the decode server.
        geometry: Geometry of its pools.
        staging: Buffers for pages of ranks with other heads, and for packed pages.
        metadata: Reads rows of metadata.
        sessions: Sessions of all prefill servers; a session is kept while it may be read from.
        secret: See `ControlLink`.
        link: Costs that decide whether pages are packed; None: they are never packed.
    """

    place: RankPlace
    geometry: PoolGeometry
    engine: Engine
    staging: Staging
    metadata: MetadataReader
    sessions: Sessions
    find_rank: FindRank
    timeouts: Timeouts
    secret: DeploymentSecret | None = None
    link: LinkCosts | None = None

    def sources_of(self, route: Route, where: str) -> list[RankPlace]:
        """The ranks of a prefill server that this rank reads from.

        Args:
            route: Route of its rank 0.
            where: Name of the server, for errors.

        Raises:
            RoomFailed: This model cannot have such ranks, or they are too many.
        """
        num_ranks, attn_tp_size = route.num_ranks, route.attn_tp_size
        why = self.geometry.why_no_split(attn_tp_size)
        if num_ranks % attn_tp_size:
            why = f"its {num_ranks} ranks are no multiple of the {attn_tp_size} that split heads"
        if why is None:
            sources = self.place.sources(RankPlace(0, num_ranks, attn_tp_size))
            if len(sources) <= MAX_SOURCES:
                return sources
            why = (
                f"this rank would read from {len(sources)} of its ranks; the limit is {MAX_SOURCES}"
            )
        raise incompatible(where, why)

"""What all receivers of a rank share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.control_connection import Timeouts, cannot_serve
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.link_costs import LinkCosts
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.rank_map import MAX_SOURCES, RankPlace
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret
from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer, TransferOp

FindRank: TypeAlias = Callable[[str, int, int], Route]
"""Finds the route of a rank of a prefill server; arguments: host and port of its bootstrap server,
rank. Asks once and may take time; raises BootstrapError."""


class Mover(Protocol):
    """The part of the Transfer Engine that a room uses; see `MooncakeTransferEngine.begin`."""

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """What all receivers of a rank share. Any thread.

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
    mover: Mover
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
            RoomFailed: No such server of this model can be, or the ranks are too many.
        """
        num_ranks, attn_tp_size = route.num_ranks, route.attn_tp_size
        why = self.geometry.why_not_split(attn_tp_size)
        if num_ranks % attn_tp_size:
            why = f"its {num_ranks} ranks are no multiple of the {attn_tp_size} that split heads"
        if why is None:
            sources = self.place.sources(RankPlace(0, num_ranks, attn_tp_size))
            if len(sources) <= MAX_SOURCES:
                return sources
            why = (
                f"this rank would read from {len(sources)} of its ranks, at most {MAX_SOURCES} can "
                "be"
            )
        raise cannot_serve(where, why)

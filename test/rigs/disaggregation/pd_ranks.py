"""A prefill and a decode server of several ranks each in this process, with real tiny models.

Ranks are threads (`RankRigs`); each has rooms or reads prompts by itself, and a mover of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rigs.disaggregation.pd_pair import NEVER_ASKED, PdPair
from rigs.disaggregation.pd_rig import (
    SLOW_BLOCKS,
    LocalMover,
    make_manager,
)
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.staging import UNIT_BYTES
from sglang.srt.disaggregation.roles import MakeRole, role_of
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool


class PdRanks(PdPair[RankRigs]):
    """Both servers.

    Args:
        model_path: A checkpoint whose layers these numbers of ranks can split.
        prefill: Ranks of the prefill server.
        decode: Ranks of the decode server.
        cp_size: Number of ranks over which the prefill server splits a prefill.
        prefill_args: Arguments of the prefill server alone.
        decode_args: Arguments of the decode server alone.
        unit_bytes: Bytes of a unit of packed pages; None: pages are not packed.
        args: Arguments of both; see `SchedulerRig`.

    Attributes:
        movers: The mover that reads for each rank of the decode server.
        endpoints: Endpoint of each rank of the prefill server; tests may replace them.
    """

    def __init__(
        self,
        model_path: Path,
        prefill: int,
        decode: int,
        *,
        cp_size: int = 1,
        prefill_args: dict[str, Any] | None = None,
        decode_args: dict[str, Any] | None = None,
        unit_bytes: int | None = None,
        **args: Any,
    ) -> None:
        super().__init__()
        link = None if unit_bytes is None else SLOW_BLOCKS
        self._packing: dict[str, Any] = {"link": link, "unit_bytes": unit_bytes or UNIT_BYTES}
        self.movers = [LocalMover() for _ in range(decode)]
        self.routes: list[Route] = []
        self.endpoints: dict[int, str] = {}
        self.prefill = RankRigs(
            model_path,
            prefill,
            cp_size,
            make_role=self._prefill_role,
            tick_s=0.001,
            disaggregation_mode=DisaggregationMode.PREFILL,
            **{**args, **(prefill_args or {})},
        )
        self.decode = RankRigs(
            model_path,
            decode,
            1,
            make_role=self._decode_role,
            tick_s=0.001,
            disaggregation_mode=DisaggregationMode.DECODE,
            **{**args, **(decode_args or {})},
        )

    def _prefill_role(self, group: RankGroup, pools: Sequence[BaseDevicePool]) -> MakeRole:
        mode = DisaggregationMode.PREFILL
        manager = make_manager(mode, pools, LocalMover(), ranks=group, **self._packing)
        routes = manager.register_to_bootstrap()
        if group.rank == 0:
            self.routes = routes
        return role_of(mode, manager, group)

    def _decode_role(self, group: RankGroup, pools: Sequence[BaseDevicePool]) -> MakeRole:
        mode, mover = DisaggregationMode.DECODE, self.movers[group.rank]
        manager = make_manager(mode, pools, mover, self._find, group, **self._packing)
        return role_of(mode, manager, group)

    def _find(self, host: str, port: int, rank: int) -> Route:
        assert (host, port) == (LOOPBACK, NEVER_ASKED)
        route = self.routes[rank]
        if rank not in self.endpoints:
            return route
        return Route(
            rank=rank,
            endpoint=self.endpoints[rank],
            instance_id=route.instance_id,
            num_ranks=route.num_ranks,
            attn_tp_size=route.attn_tp_size,
        )

    def close(self) -> None:
        for mover in self.movers:
            mover.release()
        super().close()

    @property
    def rigs(self) -> list[SchedulerRig]:
        return [rig for server in (self.prefill, self.decode) for rig in server.rigs]

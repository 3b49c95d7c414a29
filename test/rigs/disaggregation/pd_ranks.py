"""A prefill and a decode server of several ranks each in this process, with real tiny models.

Ranks are threads (`RankRigs`); each has rooms or reads prompts by itself, and a mover of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rigs.disaggregation.pd_pair import NEVER_ASKED, PdPair
from rigs.disaggregation.pd_rig import (
    SLOW_BLOCKS,
    EngineMover,
    LocalMover,
    RigEngine,
    make_manager,
)
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.staging import UNIT_BYTES
from sglang.srt.disaggregation.roles import changing_role_of, role_of
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.managers.scheduler.role_switch import MakeRole, RemakeRole, Routes
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.messages.io_struct import ControlReqOutput, PDRoleSwitchReqInput


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
        engine: Carries the bytes for all ranks; None: memory is copied.
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
        engine: RigEngine | None = None,
        **args: Any,
    ) -> None:
        super().__init__()
        link = None if unit_bytes is None else SLOW_BLOCKS
        self._packing: dict[str, Any] = {"link": link, "unit_bytes": unit_bytes or UNIT_BYTES}
        self._new_mover: Callable[[], LocalMover] = (
            LocalMover if engine is None else partial(EngineMover, engine)
        )
        self.movers = [self._new_mover() for _ in range(decode)]
        self.routes: list[Route] = []
        self._remakes: dict[RankGroup, RemakeRole] = {}
        self.endpoints: dict[int, str] = {}
        self.prefill = RankRigs(
            model_path,
            prefill,
            cp_size,
            make_role=self._make_role(DisaggregationMode.PREFILL),
            remake_role=self._remake_role,
            tick_s=0.001,
            disaggregation_mode=DisaggregationMode.PREFILL,
            **{**args, **(prefill_args or {})},
        )
        self.decode = RankRigs(
            model_path,
            decode,
            1,
            make_role=self._make_role(DisaggregationMode.DECODE),
            remake_role=self._remake_role,
            tick_s=0.001,
            disaggregation_mode=DisaggregationMode.DECODE,
            **{**args, **(decode_args or {})},
        )

    def _make_role(
        self, mode: DisaggregationMode
    ) -> Callable[[RankGroup, Sequence[BaseDevicePool]], MakeRole]:
        def make(group: RankGroup, pools: Sequence[BaseDevicePool]) -> MakeRole:
            reads = mode == DisaggregationMode.DECODE
            mover = self.movers[group.rank] if reads else self._new_mover()
            manager = make_manager(mode, pools, mover, self._find, group, **self._packing)
            self._take_routes(manager.register_to_bootstrap(), group)
            self._remakes[group] = changing_role_of(manager, group)
            return role_of(mode, manager, group)

        return make

    def _remake_role(self, group: RankGroup, mode: DisaggregationMode) -> tuple[MakeRole, Routes]:
        make, routes = self._remakes[group](mode)
        self._take_routes(msgspec.convert(routes, list[Route]), group)
        return make, routes

    def _take_routes(self, routes: list[Route], group: RankGroup) -> None:
        if routes and group.rank == 0:
            self.routes = routes

    def switch(self, server: RankRigs, new_role: DisaggregationMode) -> list[ControlReqOutput]:
        """Ask a server for the other role; the answers of all ranks."""
        server.step(PDRoleSwitchReqInput(req_id="switch", new_role=new_role))
        return [rig.answers.pop() for rig in server.rigs]

    def swap(self) -> None:
        """Change the roles of both servers, which are idle."""
        modes = DisaggregationMode.DECODE, DisaggregationMode.PREFILL
        for server, mode in zip((self.prefill, self.decode), modes, strict=True):
            answers = self.switch(server, mode)
            assert all(one.success and one.data["role"] == mode for one in answers), answers
        self.prefill, self.decode = self.decode, self.prefill

    def _find(self, host: str, port: int, rank: int, dp_rank: int) -> Route:
        assert (host, port, dp_rank) == (LOOPBACK, NEVER_ASKED, 0)
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

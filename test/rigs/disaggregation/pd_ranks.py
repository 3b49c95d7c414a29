"""A prefill and a decode server of several ranks each in this process, with real tiny models.

Ranks are threads (`RankRigs`); each has rooms or reads prompts by itself, and a mover of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rigs.disaggregation.pd_rig import (
    LOOPBACK,
    NEVER_ASKED,
    SLOW_BLOCKS,
    LocalMover,
    make_manager,
)
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import Collected
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.link_costs import UNIT_BYTES
from sglang.srt.disaggregation.roles import MakeRole, role_of
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.managers.messages.io_struct import Bootstrap, ToScheduler
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.sampling.sampling_params import SamplingParams

_TIMEOUT_S = 60.0


class PdRanks:
    """Context manager: both servers.

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
            **{**args, **(prefill_args or {})},
        )
        self.decode = RankRigs(
            model_path,
            decode,
            1,
            make_role=self._decode_role,
            tick_s=0.001,
            **{**args, **(decode_args or {})},
        )
        self._rooms = itertools.count(1)

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

    def __enter__(self) -> PdRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mover in self.movers:
            mover.release()
        self.decode.close()
        self.prefill.close()

    @property
    def servers(self) -> tuple[RankRigs, RankRigs]:
        return self.prefill, self.decode

    def request(
        self,
        rid: str,
        input_ids: list[int],
        params: SamplingParams | None = None,
        *,
        room: int | None = None,
        **fields: Any,
    ) -> ToScheduler:
        """A request message for both servers, in a new room unless `room` names one."""
        bootstrap = Bootstrap(LOOPBACK, NEVER_ASKED, next(self._rooms) if room is None else room)
        return self.decode.request(rid, input_ids, params, bootstrap=bootstrap, **fields)

    def step(
        self, to_prefill: Sequence[ToScheduler] = (), to_decode: Sequence[ToScheduler] = ()
    ) -> None:
        """Run a tick of each server."""
        self.prefill.step(*to_prefill)
        self.decode.step(*to_decode)
        if all(server.rigs[0].scheduler.poll_timeout_ms() for server in self.servers):
            time.sleep(0.0005)  # Yields to the threads that carry messages and bytes.

    def until(self, is_so: Callable[[], bool], *messages: ToScheduler) -> None:
        """Send `messages` to both, and step until `is_so`."""
        deadline = time.monotonic() + _TIMEOUT_S
        self.step(messages, messages)
        while not is_so():
            assert time.monotonic() < deadline, "it does not come to that"
            self.step()

    def is_idle(self) -> bool:
        """Whether both servers are idle, on all ranks."""
        rigs = [rig for server in self.servers for rig in server.rigs]
        return all(rig.scheduler.is_idle() for rig in rigs)

    def run(self, *messages: ToScheduler) -> None:
        """Send `messages` to both, step until both are idle, and check page ownership."""
        self.until(self.is_idle, *messages)
        self.assert_clean()

    def assert_clean(self) -> None:
        """Assert that no rank holds a slot, and that every page has one owner."""
        for server in self.servers:
            for rig in server.rigs:
                rig.assert_clean()
                rig.check()

    def result(self, rid: str) -> Collected:
        """Output of the decode server."""
        return self.decode.results[rid]

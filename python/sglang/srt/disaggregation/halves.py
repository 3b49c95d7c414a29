"""Makes the part of a scheduler that prefills or decodes for other servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import BaseKVManager
from sglang.srt.disaggregation.common.control_connection import seconds, silence_s
from sglang.srt.disaggregation.decode import DecodeHalf
from sglang.srt.disaggregation.prefill import PrefillHalf
from sglang.srt.disaggregation.utils import KVClassType, get_kv_class
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.half import Half
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.state import SchedulerState

MakeHalf = Callable[["SchedulerState", "Holder"], "Half"]


@dataclass(frozen=True, slots=True)
class HalfServer:
    """The half of a server, with the routes by which other servers find its ranks."""

    make: MakeHalf
    routes: list[Route]
    """Routes of all ranks, for the bootstrap server; empty on a decode server, which has none."""


def make_half_server(
    mode: DisaggregationMode,
    kv_manager: BaseKVManager,
    ranks: RankGroup,
    transfer_backend: TransferBackend = TransferBackend.MOONCAKE,
) -> HalfServer:
    """Make the half of a rank. A collective.

    Args:
        mode: What the server computes of its requests; not `NULL`.
        kv_manager: This rank's end of the transport.
        ranks: The ranks of this server.
        transfer_backend: Transport of the manager.
    """
    wait_s = seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
    silent_s = silence_s()

    def make(state: SchedulerState, holder: Holder) -> Half:
        if mode == DisaggregationMode.PREFILL:
            sender_class = get_kv_class(transfer_backend, KVClassType.SENDER)
            return PrefillHalf(state, kv_manager, sender_class, wait_s, ranks)
        receiver_class = get_kv_class(transfer_backend, KVClassType.RECEIVER)
        return DecodeHalf(state, holder, kv_manager, receiver_class, wait_s, silent_s, ranks)

    return HalfServer(make, kv_manager.register_to_bootstrap())

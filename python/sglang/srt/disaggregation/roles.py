"""Makes the role of a prefill or decode server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.disaggregation.base.conn import BaseKVManager
from sglang.srt.disaggregation.base.timeouts import seconds, silence_s
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.disaggregation.utils import KVClassType, get_kv_class
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler.role_switch import MakeRole, RemakeRole, Routes

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.prefill import PrefillScheduler
    from sglang.srt.managers.scheduler.role import Role
    from sglang.srt.managers.scheduler.state import SchedulerState


def role_of(
    mode: DisaggregationMode,
    kv_manager: BaseKVManager,
    ranks: RankGroup,
    transfer_backend: TransferBackend = TransferBackend.MOONCAKE,
) -> MakeRole:
    """How to make the role of a rank. Raises ValueError if a time limit in the environment is not
    positive."""
    wait_s = seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
    silent_s = silence_s()

    def make(state: SchedulerState, holder: PrefillScheduler) -> Role:
        role: Role
        if mode == DisaggregationMode.PREFILL:
            sender_class = get_kv_class(transfer_backend, KVClassType.SENDER)
            role = PrefillRole(state, kv_manager, sender_class, wait_s, ranks)
        else:
            receiver_class = get_kv_class(transfer_backend, KVClassType.RECEIVER)
            role = DecodeRole(state, holder, kv_manager, receiver_class, wait_s, silent_s, ranks)
        role.most_silence_s = silent_s
        return role

    return make


def changing_role_of(
    kv_manager: BaseKVManager,
    ranks: RankGroup,
    transfer_backend: TransferBackend = TransferBackend.MOONCAKE,
) -> RemakeRole:
    """How to change the role of a rank, whose present role has `kv_manager`."""
    current = kv_manager

    def remake(mode: DisaggregationMode) -> tuple[MakeRole, Routes]:
        nonlocal current
        current = current.in_role(mode)
        routes = [msgspec.to_builtins(route) for route in current.register_to_bootstrap()]
        return role_of(mode, current, ranks, transfer_backend), routes

    return remake

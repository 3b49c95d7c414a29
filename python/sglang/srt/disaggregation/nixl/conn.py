"""NIXL's transport between prefill and decode servers: the conversation of `common`, over agents of
NIXL that read through UCX."""

from __future__ import annotations

from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.disaggregation.base.conn import KVArgs, ServerSettings
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    manager_class,
)
from sglang.srt.distributed.device_communicators.nixl_library import NIXL_USER
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import (
    init_nixl_transfer_engine,
)
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.utils.network import address_for_peers

NixlKVSender = CommonKVSender
NixlKVReceiver = CommonKVReceiver


def make_nixl_manager(
    args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerSettings
) -> CommonKVManager:
    """A rank's end of NIXL's transport. Raises like `CommonKVManager` and `NixlTransferEngine`, and
    ValueError if the pages are not in memory of the CPU."""
    device = args.pools[0].device
    if device_kind(device.type).has_own_memory:
        raise ValueError(
            f"{NIXL_USER} reads memory of the CPU, and the pages are on {device}: use mooncake"
        )
    engine = init_nixl_transfer_engine(
        address_for_peers(server_args.host), server_args.disaggregation_ib_device
    )
    return manager_class(disaggregation_mode)(
        args,
        disaggregation_mode,
        server_args,
        engine=engine,
        transport=TransferBackend.NIXL,
    )

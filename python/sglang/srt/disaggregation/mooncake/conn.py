"""Mooncake's transport between prefill and decode servers: the conversation of `common`, over the
Transfer Engine of this process."""

from __future__ import annotations

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.conn import KVArgs, ServerSettings
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    manager_class,
)
from sglang.srt.disaggregation.common.staging import LINKS
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_mooncake_transfer_engine,
)

MooncakeKVSender = CommonKVSender
MooncakeKVReceiver = CommonKVReceiver


def make_mooncake_manager(
    args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerSettings
) -> CommonKVManager:
    """A rank's end of Mooncake's transport. Raises like `CommonKVManager`."""
    engine = get_mooncake_transfer_engine()
    assert engine is not None, "the model runner started it"
    link = LINKS.get(engine.protocol)
    kind = manager_class(disaggregation_mode)
    return kind(args, disaggregation_mode, server_args, engine=engine, link=link)

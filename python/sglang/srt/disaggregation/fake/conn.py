"""A transport that moves nothing, for warm-up and benchmarks of one server alone.

A prefill server ends each request once its prompt is computed. A decode server decodes from
whatever its pages hold: its answers are noise, also later ones that find these pages in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    BootstrapAddr,
    KVArgs,
    KVPoll,
    KVTransferError,
    KVTransferMetric,
    ServerSettings,
)

if TYPE_CHECKING:
    from sglang.srt.arg_groups.disaggregation import DisaggregationMode
    from sglang.srt.disaggregation.base.bootstrap_route import Route
    from sglang.srt.messages.first_token import FirstToken


class FakeKVManager(BaseKVManager):
    """Registers nothing, listens nowhere."""

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerSettings
    ) -> None:
        pass

    def register_to_bootstrap(self) -> list[Route]:
        return []

    def in_role(self, disaggregation_mode: DisaggregationMode) -> FakeKVManager:
        return self

    def close(self) -> None:
        pass


class FakeKVSender(BaseKVSender):
    """A request that is asked for at once, and read as soon as it is computed."""

    num_sent = 0
    _is_complete = False

    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        self.bootstrap_room = bootstrap_room

    def send(self, kv_indices: Sequence[int]) -> None:
        self.num_sent += len(kv_indices)

    def send_aux(self, metadata: FirstToken) -> None:
        self._is_complete = True

    def poll(self) -> KVPoll:
        return KVPoll.Success if self._is_complete else KVPoll.WaitingForInput

    def failure_exception(self) -> NoReturn:
        raise KVTransferError("")

    def abort(self, reason: str) -> None:
        pass

    def clear(self) -> None:
        pass


class FakeKVReceiver(BaseKVReceiver):
    """A prompt that has come as soon as there are slots for it."""

    has_ended = True
    metadata = None
    _has_slots = False

    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        self.bootstrap_room = bootstrap_room

    def init(self) -> None:
        pass

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        *,
        state_indices: Sequence[int] = (),
        decode_prefix_len: int = 0,
        request_row: int | None = None,
    ) -> None:
        self._has_slots = True

    def poll(self) -> KVPoll:
        return KVPoll.Success if self._has_slots else KVPoll.WaitingForInput

    def failure_exception(self) -> NoReturn:
        raise KVTransferError("")

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def abort(self, reason: str) -> None:
        pass

"""A decode scheduler before prefill servers that do what a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from rigs.schedulers.scheduler_rig import MAX_SECONDS, SchedulerRig
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BootstrapAddr,
    KVPoll,
    KVTransferError,
    KVTransferMetric,
)
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.managers.scheduler.role_switch import MakeRole
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.first_token import FirstToken, prompt_digest
from sglang.srt.messages.io_struct import (
    Bootstrap,
    FinishReason,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = 4
_ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "pool_tokens": 128,
    "disaggregation_mode": DisaggregationMode.DECODE,
}
WAIT_S, SILENT_S = 100.0, 10.0


class FakeServers(BaseKVManager):
    """Prefill servers that do nothing."""

    def __init__(self, page_size: int = PAGE) -> None:
        self.page_size = page_size
        self.begun: list[FakeReceiver] = []
        """Receivers with slots."""
        self.asked: list[FakeReceiver] = []
        """Receivers whose rooms were asked about."""
        self.declined: list[tuple[int, str]] = []
        self.unknown: set[int] = set()
        """Rooms that the prefill servers do not know at once."""
        self.is_closed = False

    def receiver(self, room: int) -> FakeReceiver:
        (found,) = [one for one in self.asked if one.bootstrap_room == room]
        return found

    def register_to_bootstrap(self) -> list[Route]:
        return []

    def in_role(self, disaggregation_mode: DisaggregationMode) -> FakeServers:
        raise AssertionError("the role of the rig stays")

    def close(self) -> None:
        self.is_closed = True


class FakeReceiver(BaseKVReceiver):
    """A prompt that comes when the test says so."""

    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        assert isinstance(mgr, FakeServers)
        self.bootstrap_room = bootstrap_room
        self.metadata = None
        self.failure: str | None = None
        self.is_known = False
        self.pages: list[int] = []
        self.first_page = 0
        self.is_cancelled = False
        self.is_settled = False
        self._servers = mgr

    def init(self) -> None:
        self._servers.asked.append(self)
        self.is_known = self.bootstrap_room not in self._servers.unknown

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        *,
        state_indices: Sequence[int] = (),
        decode_prefix_len: int = 0,
        request_row: int | None = None,
    ) -> None:
        self.pages = list(kv_indices)
        self.first_page = decode_prefix_len // self._servers.page_size
        self._servers.begun.append(self)

    def poll(self) -> KVPoll:
        if self.failure is not None:
            return KVPoll.Failed
        if self.metadata is not None:
            return KVPoll.Success
        if self in self._servers.begun:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self.is_known else KVPoll.Bootstrapping

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self.failure or "")

    @property
    def has_ended(self) -> bool:
        return self.is_settled

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def abort(self, reason: str) -> None:
        if self in self._servers.begun:
            self.is_cancelled = True
        else:
            self._servers.declined.append((self.bootstrap_room, reason))

    def come(self, ids: Sequence[int], **fields: Any) -> None:
        """Let the prompt come, with `fields` of its metadata."""
        digest = prompt_digest(token_array(ids))
        first = FirstToken(token_id=11, prompt_len=len(ids), prompt_digest=digest)
        self.metadata = msgspec.structs.replace(first, **fields)
        self.is_settled = True


class DecodeRig(SchedulerRig):
    """A decode scheduler, before fake prefill servers."""

    def __init__(self, model: Path, **args: Any) -> None:
        self.servers = FakeServers(args.get("page_size", PAGE))
        role: MakeRole = lambda state, holder: DecodeRole(  # noqa: E731
            state, holder, self.servers, FakeReceiver, WAIT_S, SILENT_S
        )
        super().__init__(model, make_role=lambda pools: role, **{**_ARGS, **args})

    def ask(
        self,
        rid: str,
        ids: list[int],
        room: int,
        params: SamplingParams | None = None,
        host: str = "host",
        **more: Any,
    ) -> TokenizedGenerateReqInput:
        return self.request(rid, ids, params, bootstrap=Bootstrap(host, 1, room), **more)

    def prompt(self, room: int) -> FakeReceiver:
        (found,) = [one for one in self.servers.begun if one.bootstrap_room == room]
        return found

    def end(self, rid: str) -> FinishReason:
        """Why it ended."""
        reason = self.results[rid].finish_reason
        assert reason is not None
        return reason

    def run_until(self, is_so: Callable[[], bool], *messages: TokenizedGenerateReqInput) -> None:
        """Send `messages`, then step until `is_so`."""
        self.step(*messages)
        deadline = time.monotonic() + MAX_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, "it does not come to that"
            if self.scheduler.poll_timeout_ms():
                self.wait_a_tick()  # Threads carry bytes.
            else:
                self.step()

    def run_until_ended(self, *messages: TokenizedGenerateReqInput) -> None:
        queues = self.scheduler.state.queues
        self.run_until(lambda: not any(r.spec.bootstrap is None for r in queues.alive), *messages)

    def assert_idle(self) -> None:
        assert self.scheduler.is_idle()
        self.assert_clean()
        self.check()

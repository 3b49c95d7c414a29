"""A prefill scheduler before decode servers that do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVSender,
    BootstrapAddr,
    KVPoll,
    KVTransferError,
)
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.managers.scheduler.role_switch import MakeRole
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.messages.io_struct import (
    Bootstrap,
    FinishReason,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = 4
WAIT_S = 100.0


class FakeManager(BaseKVManager):
    """A manager that remembers what its senders send."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}
        self.sent: list[tuple[int, int]] = []
        """(room, pages), in order."""
        self.tokens: dict[int, FirstToken] = {}
        self.ended: dict[int, str] = {}
        self.claimed: list[int] = []
        self.claims = True
        """True if decode servers ask for rooms at once."""
        self.outcomes: dict[int, str] = {}
        self.given_up: dict[int, str] = {}
        self.unheard: dict[int, str] = {}
        self.is_closed = False

    def register_to_bootstrap(self) -> list[Route]:
        return []

    def in_role(self, disaggregation_mode: DisaggregationMode) -> FakeManager:
        raise AssertionError("the role of the rig stays")

    def close(self) -> None:
        self.is_closed = True


class FakeSender(BaseKVSender):
    """A room in which a decode server does what the test says."""

    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None:
        assert isinstance(mgr, FakeManager)
        assert bootstrap_room not in mgr.pages, f"room {bootstrap_room} is taken"
        self.bootstrap_room = bootstrap_room
        self._manager = mgr
        mgr.pages[bootstrap_room] = []
        if mgr.claims:
            mgr.claimed.append(bootstrap_room)

    @property
    def num_sent(self) -> int:
        return len(self._manager.pages[self.bootstrap_room])

    def send(self, kv_indices: Sequence[int]) -> None:
        manager, room = self._manager, self.bootstrap_room
        assert room not in manager.ended and room not in manager.tokens
        manager.pages[room] += kv_indices
        manager.sent.append((room, len(kv_indices)))

    def send_aux(self, metadata: FirstToken) -> None:
        assert self.bootstrap_room not in self._manager.tokens
        self._manager.tokens[self.bootstrap_room] = metadata

    def poll(self) -> KVPoll:
        manager, room = self._manager, self.bootstrap_room
        if self._why():
            return KVPoll.Failed
        if room in manager.outcomes:
            return KVPoll.Success
        if room in manager.tokens:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if room in manager.claimed else KVPoll.Bootstrapping

    def _why(self) -> str:
        manager, room = self._manager, self.bootstrap_room
        return (
            manager.given_up.get(room)
            or manager.outcomes.get(room)
            or manager.unheard.get(room, "")
        )

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self._why())

    def abort(self, reason: str) -> None:
        assert self.bootstrap_room not in self._manager.ended
        self._manager.ended[self.bootstrap_room] = reason

    def clear(self) -> None:
        manager, room = self._manager, self.bootstrap_room
        del manager.pages[room], manager.ended[room]
        for gone in (manager.tokens, manager.outcomes):
            gone.pop(room, None)


class PrefillRig(SchedulerRig):
    """A prefill scheduler with a fake transport."""

    def __init__(self, model: Path, **args: Any) -> None:
        self.manager = FakeManager()
        role: MakeRole = lambda state, _: PrefillRole(  # noqa: E731
            state, self.manager, FakeSender, WAIT_S
        )
        settings = {"page_size": PAGE, "pool_tokens": 128, "chunked_prefill_size": 8}
        super().__init__(model, make_role=lambda pools: role, **{**settings, **args})

    def ask(
        self, rid: str, ids: list[int], room: int, params: SamplingParams | None = None, **more: Any
    ) -> TokenizedGenerateReqInput:
        return self.request(rid, ids, params, bootstrap=Bootstrap("host", 1, room), **more)

    def check(self) -> None:
        """Check page ownership, and that pages that were sent still belong to requests."""
        super().check()
        state = self.scheduler.state
        for req in state.queues.holders():
            if req.spec.bootstrap is not None:
                found = self.manager.pages[req.spec.bootstrap.room]
                row = state.pools.req_to_token_pool.req_to_token[req.slots.row]
                page_size = state.limits.page_size
                assert (row[: len(found) * page_size : page_size] // page_size).tolist() == found

    def compute(self, *messages: TokenizedGenerateReqInput) -> None:
        """Step until all of them are held."""
        self.step(*messages)
        rooms = [message.bootstrap.room for message in messages if message.bootstrap]
        for _ in range(200):
            self.check()
            if all(room in self.manager.tokens or room in self.manager.ended for room in rooms):
                return
            self.step()
        raise AssertionError("they are not computed")

    def run_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_so():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def run_until_read(self, room: int) -> None:
        """Step until `room` is complete, read it, and step until idle."""
        for _ in range(1000):
            if room in self.manager.tokens:
                self.manager.outcomes[room] = ""
            if self.scheduler.is_idle():
                return
            self.step()
            self.check()
        raise AssertionError("it does not come to rest")

    def end(self, rid: str) -> FinishReason:
        reason = self.results[rid].finish_reason
        assert reason is not None
        return reason

    def assert_idle(self) -> None:
        assert self.scheduler.is_idle()
        self.assert_clean()
        self.check()
        assert self.manager.pages.keys() == self.manager.ended.keys(), "rooms that nobody ends"
        role = self.scheduler._role
        assert isinstance(role, PrefillRole)
        assert not role._rooms

"""A decode scheduler before prefill servers that do what a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.disaggregation.common.protocol import FirstToken
from sglang.srt.disaggregation.common.remote_prompt import OwnSlots
from sglang.srt.disaggregation.contact import Contact
from sglang.srt.disaggregation.decode import DecodeHalf
from sglang.srt.disaggregation.halves import MakeHalf
from sglang.srt.disaggregation.prefill import prompt_digest
from sglang.srt.managers.messages.io_struct import (
    Bootstrap,
    FinishReason,
    TokenizedGenerateReqInput,
)
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.disaggregation.pd_rig import one_rank
from sglang.test.schedulers.scheduler_rig import SchedulerRig

PAGE = 4
WAIT_S, SILENT_S = 100.0, 10.0
ROUTES = (one_rank("tcp://127.0.0.1:1"),)


@dataclass
class FakePrompt:
    """A prompt that comes when the test says so."""

    meeting: Bootstrap
    pages: list[int]
    first_page: int
    outcome: FirstToken | str | None = None
    has_ended: bool = False
    is_cancelled: bool = False
    read_seconds, num_bytes_read = 0.0, 0
    metadata_bytes: dict[str, int] = field(default_factory=dict)

    def cancel(self, reason: str) -> None:
        self.is_cancelled = True

    def come(self, ids: Sequence[int], **fields: Any) -> None:
        digest = prompt_digest(token_array(ids))
        first = FirstToken(token_id=11, prompt_len=len(ids), prompt_digest=digest)
        self.outcome = msgspec.structs.replace(first, **fields)
        self.has_ended = True


class FakeContact(Contact):
    """A room at a prefill server that does nothing."""

    def __init__(self, meeting: Bootstrap, servers: FakeServers) -> None:
        super().__init__(meeting, None, servers.news)
        self._servers = servers

    def leave(self, reason: str | None = None) -> None:
        if reason is not None:
            self._servers.declined.append((self.meeting.room, reason))


@dataclass
class FakeServers:
    """Prefill servers that do nothing."""

    begun: list[FakePrompt] = field(default_factory=list)
    declined: list[tuple[int, str]] = field(default_factory=list)
    contacts: list[FakeContact] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    """Rooms that the prefill servers do not know at once."""
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.news: deque[Contact] = deque()

    def meet(self, meeting: Bootstrap) -> FakeContact:
        contact = FakeContact(meeting, self)
        self.contacts.append(contact)
        if meeting.room not in self.unknown:
            contact.know(ROUTES)
        return contact

    def contact(self, room: int) -> FakeContact:
        (found,) = [one for one in self.contacts if one.meeting.room == room]
        return found

    def take_news(self) -> list[Contact]:
        news = list(self.news)
        self.news.clear()
        return news

    def begin(self, contact: Contact, own: OwnSlots) -> FakePrompt:
        self.begun.append(FakePrompt(contact.meeting, list(own.pages), own.first_page))
        return self.begun[-1]

    def decline(self, meeting: Bootstrap, reason: str) -> None:
        self.declined.append((meeting.room, reason))

    def close(self) -> None:
        self.is_closed = True


class DecodeRig(SchedulerRig):
    """A decode scheduler, before fake prefill servers."""

    def __init__(self, model: Path, **args: Any) -> None:
        self.servers = FakeServers()
        half: MakeHalf = lambda state, holder: DecodeHalf(  # noqa: E731
            state, holder, self.servers, WAIT_S, SILENT_S
        )
        super().__init__(
            model, make_half=lambda pools: half, **{"page_size": PAGE, "pool_tokens": 128, **args}
        )

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

    def prompt(self, room: int) -> FakePrompt:
        (found,) = [one for one in self.servers.begun if one.meeting.room == room]
        return found

    def end(self, rid: str) -> FinishReason:
        """Why it ended."""
        reason = self.results[rid].finish_reason
        assert reason is not None
        return reason

    def run_until(self, is_so: Callable[[], bool], *messages: TokenizedGenerateReqInput) -> None:
        self.step(*messages)
        for _ in range(1000):
            if is_so():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def run_until_ended(self, *messages: TokenizedGenerateReqInput) -> None:
        queues = self.scheduler.state.queues
        self.run_until(lambda: not any(r.spec.bootstrap is None for r in queues.alive), *messages)

    def assert_idle(self) -> None:
        assert self.scheduler.is_idle()
        self.assert_clean()
        self.check()

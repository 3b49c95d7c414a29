"""Interface of a scheduler to the half of its requests that another server computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.protocol import FirstToken
    from sglang.srt.managers.messages.io_struct import (
        Bootstrap,
        FinishReason,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req


class Half(Protocol):
    """A server that only prefills, or only decodes, has one. Scheduler's thread."""

    def on_arrival(self, req: Req) -> FinishReason | None:
        """A request was accepted; why it cannot be after all, or None."""

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        """A request was not accepted."""

    def on_declined(self, meeting: Bootstrap, reason: str) -> None:
        """A request was refused before it came here. Its room may be another request's."""

    def is_remote(self, req: Req) -> bool:
        """Whether the prompt of a waiting request is computed elsewhere."""

    def may_compute(self, req: Req) -> bool:
        """Whether the prompt of a waiting request may be computed here now."""

    def on_computed(self, work: PrefillWork) -> None:
        """A part of a prompt has its keys and values."""

    def keeps(self, req: Req) -> bool:
        """Whether a request whose prompt is complete does not decode here."""

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        """The prompt and the first token of a request that is kept are there.

        Args:
            reason: Why its first token ends it, or None.
        """

    def tick(self) -> None:
        """Look for what has come and what can begin."""

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        """Requests that have ended on this server."""

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        """Requests whose prompt has come."""

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        """A request ends. Whether nothing touches its slots any more: where something does, it is
        told to stop, and `take_let_go` has the request later."""

    def take_let_go(self) -> Sequence[Req]:
        """Requests that have ended, and whose slots nothing touches any more."""

    def close(self) -> None:
        """End what runs beside the scheduler."""


class NoOtherHalf:
    """The requests of a server that does both."""

    def on_arrival(self, req: Req) -> FinishReason | None:
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        pass

    def on_declined(self, meeting: Bootstrap, reason: str) -> None:
        raise AssertionError("a server that does both has no rooms")

    def is_remote(self, req: Req) -> bool:
        return False

    def may_compute(self, req: Req) -> bool:
        return True

    def on_computed(self, work: PrefillWork) -> None:
        pass

    def keeps(self, req: Req) -> bool:
        return False

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        raise AssertionError("nothing is handed over: this server does both")

    def tick(self) -> None:
        pass

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        return ()

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        return ()

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        return True

    def take_let_go(self) -> Sequence[Req]:
        return ()

    def close(self) -> None:
        pass

"""Role of a server: prefill, decode, or both. The scheduler calls its hooks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.messages.first_token import FirstToken
    from sglang.srt.messages.io_struct import (
        Bootstrap,
        FinishReason,
        TokenizedGenerateReqInput,
    )


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """Progress of transfers in a tick."""

    released: list[Req] = field(default_factory=list)
    """Ended requests whose slots no transfer uses any more."""
    ended: list[tuple[Req, FinishReason]] = field(default_factory=list)
    """Requests that end on this server."""
    received: list[tuple[Req, FirstToken]] = field(default_factory=list)
    """Requests whose prompt has arrived."""


_NO_UPDATE: Final = TransferUpdate()


class Role:
    """Hooks of a server that prefills and decodes; one that does a part of it overrides them.
    Scheduler's thread."""

    most_silence_s: float = math.inf
    """Seconds without an answer after which other servers count this one as gone; inf: none do."""

    def on_arrival(self, req: Req) -> FinishReason | None:
        """A request was accepted; sets where its parts are done. Returns the reason to refuse it
        after all, or None."""
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        """A request was not accepted."""

    def on_declined(self, bootstrap: Bootstrap, reason: str) -> None:
        """A request was refused before it came here. Another request may have the same room."""
        raise AssertionError("a server that does both has no rooms")

    def may_compute(self, req: Req) -> bool:
        """True if the prompt of a waiting request may be computed here now."""
        return True

    def on_computed(self, work: PrefillWork) -> None:
        """A part of a prompt has its keys and values."""

    def is_read(self, req: Req) -> bool:
        """True if another server may be reading computed pages of `req`, whose prompt is not
        complete."""
        return False

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        """The prompt of a request that decodes elsewhere was computed and its first token sampled.
        `reason`: why the request ends with that token; None: it goes on."""
        raise AssertionError("all requests decode here")

    def tick(self) -> TransferUpdate:
        """Act on arrivals and ended transfers, and begin the transfers that can begin."""
        return _NO_UPDATE

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        """A request ends. True: no transfer uses its slots. False: a transfer does; it is told to
        stop, and a later `tick` releases the request."""
        return True

    def close(self) -> None:
        """End the threads and transfers."""

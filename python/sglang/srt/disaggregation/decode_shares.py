"""Slots of a decode server that the prompts of each prefill server may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHARE: Final = 4
"""See `is_within_share`."""


@dataclass(slots=True)
class Share:
    """What prompts on their way from one prefill server hold.

    Attributes:
        num_requests: Requests, those that have ended included.
        num_lingering: Those that have ended.
        num_tokens: Slots.
        ended: Time of the last end among those that have ended.
    """

    num_requests: int = 0
    num_lingering: int = 0
    num_tokens: int = 0
    ended: float = 0.0

    def add(self, num_tokens: int, ended: float | None) -> None:
        """Count a prompt.

        Args:
            num_tokens: Slots that it holds.
            ended: Time of its request's end; None: it has not ended.
        """
        self.num_requests += 1
        self.num_tokens += num_tokens
        if ended is not None:
            self.num_lingering += 1
            self.ended = max(self.ended, ended)

    def why_stuck(self, now: float, silent_s: float) -> str | None:
        """Reason to take no new requests of the prefill server, or None: all that its share holds
        are reads for ended requests, and they have not ended for `silent_s` seconds."""
        if self.num_lingering < self.num_requests or now - self.ended < silent_s:
            return None
        return (
            f"reads of {self.num_lingering} earlier prompts from the prefill server have not "
            f"ended for {silent_s:.0f} s, and hold its share of the slots"
        )


def is_within_share(own: int, need: int, free: int) -> bool:
    """Whether the prompts of one prefill server may take more slots. They may hold at most `_SHARE`
    times what stays free: one server gets at most four fifths, two get four ninths each, and any
    number of servers leaves something to others.

    Args:
        own: Slots that its prompts on their way hold.
        need: Slots that one more prompt needs.
        free: Slots that are free now.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", IEEE/ACM Transactions on Networking 6 (1998).
    """
    return own + need <= _SHARE * (free - need)

"""What a simulated server is given: measured seconds, and sizes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy

WHOLE_UNIT: Final = 1024
"""`dense_attention.UNIT`: tokens of a prompt whose attention is split between cuDNN and Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one server, measured while it has no other work."""

    linear: float
    """A new token, without attention to others."""
    by_pair: float
    """Attention of a new token to one token before it."""
    by_before: float = 0.0
    """Added for each token before those that a pass computes of a prompt: attention reads a prefix
    in pieces, and few new tokens do not hide that. Grows with these, up to `WHOLE_UNIT`."""
    step: float
    """A decode step."""
    by_request: float = 0.0
    """Added to a step for each request."""
    by_context: float
    """Added to a step for each token of context."""
    read: float | None = None
    """Reading a token from L3 to L2; None: there is no L3."""
    write: float = 0.0
    """Writing a token from L2 to L3."""
    copied: float = 0.0
    """The part of `read` and of `write` that one thread does for all servers."""
    load: float = 0.0
    """Loading a token from L2 to L1, while the device computes."""
    by_prompt_token: float = 0.0
    """Work of client and server on a token of a prompt, before the prompt is queued."""

    def prefill(self, new: int, before: int) -> float:
        """Seconds to compute `new` tokens after `before` others."""
        pairs, pieces = new * (before + new / 2), before * min(1.0, new / WHOLE_UNIT)
        return new * self.linear + pairs * self.by_pair + pieces * self.by_before

    def decode(self, contexts: Sequence[int]) -> float:
        """Seconds of a step of requests with so many tokens each."""
        return self.step + len(contexts) * self.by_request + sum(contexts) * self.by_context


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """Sizes and settings of a server. Lengths are tokens."""

    page_size: int
    l1: int
    l2: int = 0
    chunk: int = 8192
    """`--chunked-prefill-size`."""
    threshold: int = 256
    """`prefetch_threshold`."""
    policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    timeout: tuple[float, float, float] = (2.0, 0.1, 30.0)
    """Seconds: `prefetch_timeout_base`, `prefetch_timeout_per_ki_token`, `prefetch_timeout_max`."""

    def wait_s(self, tokens: int) -> float:
        """The longest that a request waits for a read of `tokens`."""
        base, per_ki, most = self.timeout
        if self.policy is PrefetchPolicy.WAIT_COMPLETE:
            return most
        return min(most, base + per_ki * tokens / 1024)


class Clock:
    """Simulated time in seconds, and what will happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` in `seconds`; what was planned first comes first."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def run(self) -> None:
        """Let all happen."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


@dataclass(eq=False, slots=True)
class _Call:
    """A call that waits for the thread that copies."""

    left: float
    """Seconds of the thread."""
    pieces: int
    act: Callable[[], None]


class CopyThread:
    """The thread of a store's client that copies for all servers.

    A call hands it some pieces at a time, which are copied in the order of their coming: calls
    share the thread in proportion to their pieces.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._since = clock, 0.0
        self._calls: list[_Call] = []
        self._version = 0

    def after(self, own: float, copied: float, act: Callable[[], None], *, pieces: int = 1) -> None:
        """Call `act` after `own` seconds of the caller's thread, and then `copied` of this one.

        `pieces`: parts of the call that wait for the thread at once.
        """

        def copy() -> None:
            self._pass_time()
            self._calls.append(_Call(copied, pieces, act))
            self._plan()

        self._clock.after(own, copy)

    def _pass_time(self) -> None:
        pieces = sum(call.pieces for call in self._calls)
        for call in self._calls:
            call.left -= (self._clock.now - self._since) * call.pieces / pieces
        self._since = self._clock.now

    def _plan(self) -> None:
        """Plan the end of the next call, which a further call delays."""
        self._version += 1
        if self._calls:
            version, pieces = self._version, sum(call.pieces for call in self._calls)
            seconds = min(call.left / call.pieces for call in self._calls) * pieces
            self._clock.after(max(0.0, seconds), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._pass_time()
        first = min(self._calls, key=lambda call: call.left / call.pieces)
        self._calls.remove(first)
        self._plan()
        first.act()

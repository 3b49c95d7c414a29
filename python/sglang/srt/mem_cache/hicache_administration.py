"""Changes of L3 while the server runs: one at a time, each in a thread that may fail or hang.

A change has two halves. Its work runs in a thread of its own: reading a configuration, importing a
backend, connecting, clearing, closing. None of that is ours to bound. What follows runs in the
scheduler's thread at the tick at which the ranks agree that the work has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from sglang.srt.mem_cache.ballot import Verdict
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.utils.background_call import BackgroundCall

LONGEST_CHANGE_S: Final = 100.0
"""Seconds after which a change is given up: before clients give up waiting for its answer."""
_MAX_LEFT_BEHIND: Final = 4
"""Changes that were given up and still hang: each keeps a thread, and whatever it has reached."""
_TICK_S: Final = 0.01
_EXPECTED: Final = (ValueError, StorageUnavailable)

T = TypeVar("T")


class ChangeResult(NamedTuple):
    """How a change ended."""

    done: bool
    message: str
    """What was done, or why not. One line."""


@dataclass(frozen=True, slots=True)
class _Change:
    what: str
    call: BackgroundCall[Any]
    accept: Callable[[Any], str]
    on_failure: Callable[[], None]


class StorageAdministration:
    """The change under way and the result of the last one. Scheduler thread only.

    Owns one thread, `hicache-administration`, while a change is under way.
    """

    def __init__(self) -> None:
        self._change: _Change | None = None
        self._result: ChangeResult | None = None
        self._left_behind: list[BackgroundCall[Any]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a change has begun and not ended: another one has to wait."""
        return self._change is not None

    def begin(
        self,
        what: str,
        work: Callable[[], T],
        accept: Callable[[T], str],
        *,
        discard: Callable[[T], object] | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a change.

        Args:
            what: A noun, for messages.
            work: In its thread. Raises ValueError or StorageUnavailable with one line that says
                why not; whatever else it raises is described.
            accept: Scheduler thread: takes the result up on every rank; what was done.
            discard: Undoes a result that is not taken up, in a thread.
            on_failure: Scheduler thread: where it failed or was given up.

        Raises:
            ValueError: Earlier ones still hang.
        """
        assert not self.is_under_way
        self._left_behind = [call for call in self._left_behind if not call.ended]
        if len(self._left_behind) >= _MAX_LEFT_BEHIND:
            raise ValueError(
                f"{len(self._left_behind)} changes of L3 that were given up still hang; restart "
                "the server, and look into its log for what they wait for"
            )
        call = BackgroundCall("hicache-administration", work, expected=_EXPECTED, discard=discard)
        self._change, self._result = _Change(what, call, accept, on_failure), None

    def wait(self, tick: Callable[[], None]) -> ChangeResult:
        """The end of the change, for who has nothing else to do than to `tick` meanwhile."""
        deadline = time.monotonic() + LONGEST_CHANGE_S
        while (result := self.take_result()) is None:
            if time.monotonic() > deadline:
                self.give_up(f"it has taken {LONGEST_CHANGE_S:.0f} s")
            if self._change is not None:
                self._change.call.wait(_TICK_S)
            tick()
        return result

    def progress(self) -> Verdict:
        """What this rank sees of the change."""
        if self._change is None or not self._change.call.ended:
            return Verdict.UNDER_WAY
        return Verdict.on(is_good=self._change.call.error is None)

    def settle(self, agreed: Verdict) -> None:
        """Take the tick's agreement on `progress`."""
        if self._change is None or agreed is Verdict.UNDER_WAY:
            return
        change, self._change = self._change, None
        if agreed is Verdict.LANDED:
            self._result = ChangeResult(True, change.accept(change.call.result))
            return
        error = change.call.error
        if error is None:
            change.call.abandon()
        change.on_failure()
        self._result = ChangeResult(False, _why(change.what, error))

    def give_up(self, why: str) -> None:
        """End the change under way without its result; one that comes later is undone."""
        if self._change is None:
            return
        change, self._change = self._change, None
        change.call.abandon()
        self._left_behind.append(change.call)
        change.on_failure()
        self._result = ChangeResult(False, f"the {change.what} was given up: {why}")

    def take_result(self) -> ChangeResult | None:
        """How the last change ended; once."""
        result, self._result = self._result, None
        return result


def _why(what: str, error: BaseException | None) -> str:
    if error is None:
        return f"the {what} failed on another rank; see its log"
    if isinstance(error, _EXPECTED):
        return str(error)
    return f"the {what} failed: {type(error).__name__}: {' '.join(str(error).split())}"

"""Counts of a scheduler over the last minutes, sampled every few seconds.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

_PERIOD_S: Final = 5.0
_SAMPLES: Final = 60
"""Five minutes."""


class FlowHistory:
    """Samples of counts that only rise.

    An idle scheduler makes no ticks, and its counts do not change. The first tick after a pause
    adds a sample for the last tick before it, so that no tokens seem to move during the pause.

    Args:
        read: The counts now, by name.
    """

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=_SAMPLES)
        self._last_tick = 0.0

    def on_tick(self, now: float) -> None:
        """Sample if it is time. `now`: seconds of the scheduler's clock."""
        if self._samples and now - self._samples[-1][0] < _PERIOD_S:
            self._last_tick = now
            return
        counts = self._read()
        if self._samples and self._samples[-1][0] < self._last_tick < now - _PERIOD_S:
            self._samples.append((self._last_tick, counts))
        self._samples.append((now, counts))
        self._last_tick = now

    def latest(self, now: float) -> list[dict[str, Any]]:
        """The samples, oldest first, and one of now: `age_s` in seconds, `counts`."""
        samples = [*self._samples, (now, self._read())]
        return [{"age_s": round(now - at, 1), "counts": dict(counts)} for at, counts in samples]

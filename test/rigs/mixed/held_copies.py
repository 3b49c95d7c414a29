"""Copies between L1 and L2 that run when a driver says so, so that a seed decides their times."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Self
from unittest.mock import patch

from sglang.srt.hardware_backend import device_runtime as runtimes
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.hardware_backend.device_runtime import CopyStream, Event


class HeldCopies:
    """Context manager: streams that are made inside hold their copies. A copy runs in
    `run_some`, or when something waits for it. All in one thread."""

    def __init__(self) -> None:
        self._streams: list[_HeldStream] = []
        self._chance = 1.0
        held = self

        class Runtime(CpuRuntime):
            def make_event(self) -> Event:
                return _HeldEvent(held)

            def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
                held._streams.append(_HeldStream())
                return held._streams[-1]

        self._patch = patch.dict(runtimes._REGISTERED, cpu=Runtime)

    def __enter__(self) -> Self:
        self._patch.start()
        runtimes.device_runtime.cache_clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        runtimes.device_runtime.cache_clear()

    def run_some(self, rng: random.Random) -> None:
        """Run the first copies of each stream: all or none for a while, or some."""
        if rng.random() < 0.05:
            self._chance = rng.choice((0.0, 0.1, 0.5, 1.0))
        for stream in self._streams:
            while stream.works and rng.random() < self._chance:
                stream.run_one()

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run copies until `is_reached`: loads, for which steps wait, before writes."""
        for stream in reversed(self._streams):
            while stream.works and not is_reached():
                stream.run_one()
        assert is_reached(), "nothing will record the event"


class _HeldStream(CopyStream):
    def __init__(self) -> None:
        self.works: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        self.works.append(work)

    def run_one(self) -> None:
        self.works.popleft()()

    def close(self) -> None:
        while self.works:
            self.run_one()


class _HeldEvent:
    def __init__(self, held: HeldCopies) -> None:
        self._held = held
        self._is_reached = False

    def record(self) -> None:
        self._is_reached = True

    def query(self) -> bool:
        return self._is_reached

    def synchronize(self) -> None:
        self._held.run_until(self.query)

    wait = synchronize

"""Copies between L1 and L2, and steps, that run when a driver says so: seeds decide the times."""

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
    """Context manager: streams and devices that are made inside hold their work. It runs in
    `run_some`, or when something waits for it. All in one thread.

    Args:
        lagging: `LaggingRuntime`, if steps are held too.
    """

    def __init__(self, lagging: type[CpuRuntime] | None = None) -> None:
        self._streams: list[HeldWork] = []
        self._devices: list[HeldWork] = []
        self._chances = [1.0, 1.0]
        bases = (_HeldRuntime,) if lagging is None else (lagging, _HeldRuntime)
        runtime = type("HeldRuntime", bases, {"held": self})
        self._patch = patch.dict(runtimes._REGISTERED, cpu=runtime)

    def __enter__(self) -> Self:
        self._patch.start()
        runtimes.device_runtime.cache_clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        runtimes.device_runtime.cache_clear()

    def add(self, *, is_device: bool = False) -> HeldWork:
        """The work of a new stream, or of a new device."""
        works = self._devices if is_device else self._streams
        works.append(HeldWork())
        return works[-1]

    def run_some(self, rng: random.Random) -> None:
        """Run the first works of each device and stream: all or none for a while, or some."""
        if rng.random() < 0.1:
            self._chances = [rng.choice((0.0, 0.1, 0.5, 1.0)) for _ in range(2)]
        for works, chance in zip((self._devices, self._streams), self._chances, strict=True):
            for one in works:
                while one.queue and rng.random() < chance:
                    one.run_one()

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run until `is_reached`: steps, unless one of them waits, loads, and then writes."""
        for one in (*self._devices, *reversed(self._streams)):
            while one.queue and not one.is_running and not is_reached():
                one.run_one()
        assert is_reached(), "nothing will record the event"


class HeldWork:
    """Work in order, which one thread runs."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.is_running = False

    def run_one(self) -> None:
        """Run the first piece."""
        self.is_running = True
        try:
            self.queue.popleft()()
        finally:
            self.is_running = False


class _HeldRuntime(CpuRuntime):
    held: HeldCopies

    def make_event(self) -> Event:
        return _HeldEvent(self.held)

    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        return _HeldStream(self.held.add())


class _HeldStream(CopyStream):
    def __init__(self, work: HeldWork) -> None:
        self._work = work

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        self._work.queue.append(work)

    def close(self) -> None:
        while self._work.queue:
            self._work.run_one()


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

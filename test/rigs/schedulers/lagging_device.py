"""A made-up device that runs steps later than they are launched, as a GPU does.

Submitted work runs in order on a separate thread, after pauses. A `LaggingRuntime` makes the engine
see the CPU as such a device: results, events and copies come when the device has reached them, and
copies of slots to the CPU take time.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from unittest.mock import patch

import torch

from rigs.mixed.held_copies import HeldCopies, HeldWork
from sglang.srt.hardware_backend import device_runtime as runtimes
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.hardware_backend.device_runtime import CopyStream, HostCopies
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import StateSpec

_CURRENT: Final = threading.local()


class LaggingDevice:
    """Runs work in order on its own thread. The thread that makes it uses it, and closes it. The
    last one made is the thread's current one.

    Args:
        rng: Source of the pauses.
        most_lag_s: Longest pause before a piece of work, in seconds.
    """

    def __init__(self, rng: random.Random, most_lag_s: float) -> None:
        self._rng = rng
        self._most_lag_s = most_lag_s
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_done = 0
        self.position = 0
        """Pieces of work submitted so far."""
        self.error: BaseException | None = None
        """Error of the first piece that failed. No further piece runs."""
        self._thread = threading.Thread(target=self._work, name="lagging-device", daemon=True)
        self._thread.start()
        self.make_current()

    @staticmethod
    def new(rng: random.Random, most_lag_s: float) -> LaggingDevice:
        """A lagging device, or a held one within `HeldCopies`."""
        held: HeldCopies | None = getattr(runtimes.device_runtime("cpu"), "held", None)
        if held is None:
            return LaggingDevice(rng, most_lag_s)
        return _HeldDevice(held.add(is_device=True))

    def make_current(self) -> None:
        """Let it be the device of the calling thread, which may have several."""
        _CURRENT.device = self

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        self.position += 1
        self._queue.put(work)

    def has_reached(self, position: int) -> bool:
        """True if the first `position` pieces of work are done, or never will be."""
        return self._num_done >= position

    def wait(self, position: int) -> None:
        """Block until `has_reached`. Any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_reached(position))

    def close(self) -> None:
        """Run what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        _CURRENT.device = None

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if self.error is None:
                if self._rng.random() < 0.3:
                    time.sleep(self._rng.random() * self._most_lag_s)
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - raised where results are awaited
                    self.error = error
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()


class _HeldDevice(LaggingDevice):
    """A device whose work runs when a driver says so."""

    def __init__(self, work: HeldWork) -> None:
        self._held = work
        self._num_done = self.position = 0
        self.error = None
        self.make_current()

    def submit(self, work: Callable[[], None]) -> None:
        def run() -> None:
            self._num_done += 1
            if self.error is None:
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - raised where results are awaited
                    self.error = error

        self.position += 1
        self._held.queue.append(run)

    def wait(self, position: int) -> None:
        while not self.has_reached(position):
            self._held.run_one()

    def close(self) -> None:
        self.wait(self.position)
        _CURRENT.device = None


class LaggingStates(MambaPool):
    """Recurrent states that are zeroed and copied in order with the steps."""

    def __init__(self, spec: MambaSpec, size: int, lagging: LaggingDevice) -> None:
        super().__init__(spec, size, "cpu")
        self._lagging = lagging

    def copy_from(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._lagging.submit(lambda: MambaPool.copy_from(self, src, dst))

    def zero(self, slots: torch.Tensor) -> None:
        self._lagging.submit(lambda: MambaPool.zero(self, slots))


class LaggingRequests(RequestPool):
    """States of running requests that are zeroed in order with the steps."""

    def __init__(self, spec: StateSpec, size: int, lagging: LaggingDevice) -> None:
        super().__init__(spec, size, "cpu")
        self._lagging = lagging

    def zero(self, rows: Sequence[int]) -> None:
        self._lagging.submit(lambda: RequestPool.zero(self, rows))


class LaggingRuntime(CpuRuntime):
    """The CPU as a device that lags, for threads that have made a `LaggingDevice`."""

    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        stream, device = super().make_copy_stream(name, is_urgent=is_urgent), _current()
        return stream if device is None else _FollowingStream(stream, device)

    def copy_to_host(self, tensors: Sequence[torch.Tensor | None]) -> HostCopies:
        copies, device = super().copy_to_host(tensors), _current()
        return copies if device is None else _LaterCopies(copies, device)

    @classmethod
    @contextlib.contextmanager
    def as_cpu(cls) -> Iterator[None]:
        """Make it the runtime of the CPU in this process."""
        with patch.dict(runtimes._REGISTERED, cpu=cls):
            runtimes.device_runtime.cache_clear()
            try:
                yield
            finally:
                runtimes.device_runtime.cache_clear()


def _current() -> LaggingDevice | None:
    found: LaggingDevice | None = getattr(_CURRENT, "device", None)
    return found


class _FollowingStream(CopyStream):
    """Copies that wait for the steps that were launched before them."""

    def __init__(self, stream: CopyStream, device: LaggingDevice) -> None:
        self._stream = stream
        self._device = device

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        position = self._device.position if follows_caller else 0

        def later() -> None:
            self._device.wait(position)
            work()

        self._stream.submit(later)

    def close(self) -> None:
        self._stream.close()


class _LaterCopies(HostCopies):
    """Tensors that are there when the device has reached the point at which they were asked for."""

    def __init__(self, copies: HostCopies, device: LaggingDevice) -> None:
        self._copies = copies
        self._device = device
        self._position = device.position

    @property
    def is_done(self) -> bool:
        return self._device.has_reached(self._position)

    def wait(self) -> list[torch.Tensor | None]:
        self._device.wait(self._position)
        if self._device.error is not None:
            raise self._device.error
        return self._copies.wait()

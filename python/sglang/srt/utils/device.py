"""Streams, events and pinned memory for every device, with the CPU as a first-class one.

The one place that knows `torch.cuda`. On an accelerator a `CopyStream` is a stream of the
device. On a CPU it is a worker thread with a FIFO queue: copies really are asynchronous there
too (torch releases the GIL while it copies), so whatever holds for copies in flight is exercised
on every machine and not only where there is a GPU.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a `CopyStream`. `record` is called inside the stream's work."""

    def record(self) -> None:
        """Mark the point: everything submitted to the stream before it comes first."""

    def query(self) -> bool:
        """True once the point has been reached. Never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until the point has been reached."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the calling thread) after the point."""


class _CpuEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    wait = synchronize


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._recorded = False

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream())
        self._recorded = True

    def query(self) -> bool:
        return self._recorded and bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class CopyStream:
    """Runs copy functions one after the other, beside the caller.

    Threads: `submit` may be called from any one thread (the scheduler's). On a CPU the work
    runs in a daemon thread that this object owns and `close` ends; on CUDA it is issued by the
    caller into a stream of its own, which first waits for the caller's current stream.

    A copy that raises is a bug of ours that would leave wrong bytes in a cache: the process
    ends with the cause (`os._exit`), since nobody may go on reading those pages.
    """

    def __init__(self, device: torch.device | str, name: str) -> None:
        self._device = torch.device(device)
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        else:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work` behind what was submitted before. It records its own events."""
        if self._stream is None:
            self._queue.put(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def close(self) -> None:
        """End the worker after the work already queued. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        elif self._stream is not None:
            self._stream.synchronize()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.critical("copy stream %s failed; its pages are unusable", self._name)
                logger.exception("the cause")
                logging.shutdown()
                os._exit(70)


def make_event(device: torch.device | str) -> Event:
    """An event for work on `device`; not reached until it has been recorded and passed."""
    return _CudaEvent() if torch.device(device).type == "cuda" else _CpuEvent()


def detect_device() -> str:
    """`cuda` where torch sees one, `npu` where torch_npu is installed, else `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    return "cpu"


def can_pin_memory(device: torch.device | str) -> bool:
    """True where copies to `device` gain from page-locked host memory."""
    return torch.device(device).type == "cuda" and torch.cuda.is_available()

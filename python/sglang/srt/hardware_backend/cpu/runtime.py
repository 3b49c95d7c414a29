"""The CPU as a device. Copies are asynchronous here too, because torch and numpy release the GIL
while they copy. This exercises the handling of copies in flight on every machine."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import CPU
from sglang.srt.hardware_backend.device_runtime import (
    CopyStream,
    DeviceRuntime,
    Event,
    HostCopies,
    SideStream,
)
from sglang.srt.utils.process import host_memory
from sglang.srt.utils.threads import leave_cores_to_model, lower_priority

logger = logging.getLogger(__name__)


class CpuRuntime(DeviceRuntime):
    """The CPU, which all ranks share."""

    kind = CPU

    def __init__(self, device: str) -> None:
        """`device`: `cpu`, or `cpu:0`."""

    def why_absent(self) -> str | None:
        return None

    def prepare(self) -> None:
        """Limit oneDNN's and torch's caches of compiled code."""
        envs.ONEDNN_PRIMITIVE_CACHE_CAPACITY.export_default()
        envs.LRU_CACHE_CAPACITY.export_default()

    def set_device(self, index: int) -> None:
        pass

    def make_event(self) -> Event:
        return _ThreadEvent()

    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        return _CopyThread(name, is_urgent=is_urgent)

    def make_side_stream(self, *, is_urgent: bool = True) -> SideStream:
        return SideStream()

    def synchronize(self) -> None:
        """Does nothing, because calls complete before they return."""

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        pass

    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cpu, f"a tensor to stage is in host memory, not on {tensor.device}"
        return tensor

    def empty_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def copy_to_host(self, tensors: Sequence[torch.Tensor | None]) -> HostCopies:
        return HostCopies(list(tensors))

    def memory(self) -> tuple[int, int]:
        return host_memory()

    def device_name(self) -> str:
        return self.kind.name


class _ThreadEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    wait = synchronize


class _CopyThread(CopyStream):
    """A daemon thread with a FIFO queue, which `close` ends.

    Copies that no step waits for run at lower priority, so that they do not take cores from a
    forward.

    A copy that raises is a bug that would leave wrong bytes in a cache. The process ends with the
    cause (`os._exit`), because those pages must not be read.
    """

    def __init__(self, name: str, *, is_urgent: bool) -> None:
        self._name = name
        self._is_urgent = is_urgent
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._work, name=name, daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        self._queue.put(work)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        leave_cores_to_model()
        if not self._is_urgent:
            lower_priority()
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.critical("copy stream %s failed; its pages are unusable", self._name)
                logger.exception("the cause")
                logging.shutdown()
                os._exit(70)

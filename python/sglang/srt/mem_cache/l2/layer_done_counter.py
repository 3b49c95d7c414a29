"""Order of the readers of each layer after the load from L2 that fills it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.hardware_backend.device_runtime import Event, device_runtime


class LayerDoneCounter:
    """Orders the readers of each layer after the load that fills it.

    A load is a producer: it comes in steps, and records an event after each. A forward names the
    producer that it must wait for; -1 is none. Threads: `update_producer`, `set_consumer` and
    `wait_until` run on the scheduler's (and the forward's) thread; events are recorded by the load
    stream.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._make_event = device_runtime(device).make_event
        self._next = 0
        self._unawaited: list[Event] | None = None
        """For each layer its event in the newest load, until a forward waits for it."""
        self._waiting_for: list[Event] | None = None

    @property
    def num_producers(self) -> int:
        """Loads that were registered since the start."""
        return self._next

    def update_producer(self, step_of: Sequence[int]) -> tuple[int, list[Event]]:
        """Register a new load; return its index, and the events for it to record, one per step.

        It supersedes an earlier load that no forward has waited for: loads run in order, so that
        waiting for this one is waiting for both.

        Args:
            step_of: For each layer the step after which it may be read; ascending from 0.
        """
        index = self._next
        self._next += 1
        events = [self._make_event() for _ in range(step_of[-1] + 1)]
        self._unawaited = [events[step] for step in step_of]
        return index, events

    def set_consumer(self, index: int) -> None:
        """Let the next forward wait for load `index` and all others up to now; -1: for none."""
        self._waiting_for = None
        if index != -1:
            self._waiting_for, self._unawaited = self._unawaited, None

    def wait_until(self, threshold: int) -> None:
        """Block until layer `threshold` has been loaded, or order the current stream after that."""
        if self._waiting_for is not None:
            self._waiting_for[threshold].wait()

    def reset(self) -> None:
        """Forget all loads. None may be under way."""
        self._unawaited = self._waiting_for = None

"""Rigs in which copies and transfers happen when a test says so, never beside it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from rigs.caches.cache_rig import CacheRig, HeldStream, RigRequest
from rigs.caches.state_rig import StateRig
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.l3.attached_store import AttachedStore


class SteppedRig(CacheRig):
    """A rig in which nothing moves by itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        controller = self.hi.cache_controller
        for stream in (controller._write_stream, controller._load_stream):
            stream.close()
        self.writes, self.loads = HeldStream(), HeldStream()
        controller._write_stream, controller._load_stream = self.writes, self.loads  # type: ignore[assignment]
        eviction = self.hi.eviction
        self._finish = eviction._finish_write_back
        eviction._finish_write_back = self._finish_with_copies  # type: ignore[method-assign]
        if self.hi.store.attached is not None:
            _stop_threads(self.hi.store.attached)

    def _finish_with_copies(self, leaving: Any) -> None:
        # Under write_back an eviction waits for its copies.
        if leaving.nodes:
            self.writes.run()
        self.writes.at_once = True
        try:
            self._finish(leaving)
        finally:
            self.writes.at_once = False

    def _compute(self, request: RigRequest) -> None:
        # The forward pass waits for the layers of its load.
        self.loads.run()
        super()._compute(request)

    def tick(self) -> None:
        # No time passes; but a turn to read in parts passes on from who is not asked about.
        self.tree.begin_tick(0.0)
        super().tick()

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(50):
            if condition():
                return
            self.land_all()
            self.tick()
        raise AssertionError(f"nothing happens any more; busy: {self.tree.is_busy()}")

    def land_all(self) -> None:
        self.hi.ready_to_load_host_cache()
        self.writes.run()
        self.loads.run()
        self.backups(None)
        self.prefetches(None)

    def backups(self, count: int | None) -> None:
        """Do the first `count` writes to L3."""
        if (attached := self.hi.store.attached) is not None:
            _serve(attached.writes.queue, attached.writes.run, count)

    def prefetches(self, count: int | None) -> None:
        """Do the first `count` reads from L3."""
        if (attached := self.hi.store.attached) is not None:
            self.hi.storage_prefetch.begin_tick()
            if count is not None:
                _ungroup(attached.reads.queue)
            _serve(attached.reads.queue, attached.reads.run, count)


def _stop_threads(attached: AttachedStore) -> None:
    for waiting in (attached.reads.queue, attached.writes.queue):
        waiting.put(None)
    attached._closing.set()
    attached.breaker.end()
    for thread in attached._threads:
        thread.join()


def _ungroup(waiting: queue.SimpleQueue[Any]) -> None:
    """Ask about each prompt in a question of its own."""
    for _ in range(waiting.qsize()):
        one = waiting.get()
        for asked in one if isinstance(one, list) else [one]:
            waiting.put([asked] if isinstance(one, list) else asked)


def _serve(waiting: queue.SimpleQueue[Any], serve: Callable[[], None], count: int | None) -> None:
    """Do a transfer thread's work here, for the first `count` operations."""
    operations = []
    while not waiting.empty():
        operations.append(waiting.get())
    count = len(operations) if count is None else count
    for operation in [*operations[:count], None]:
        waiting.put(operation)
    with patch.object(storage_writes, "_GATHER_S", 0.0):
        serve()
    for operation in operations[count:]:
        waiting.put(operation)


class SteppedStateRig(SteppedRig, StateRig):
    """A rig of a model with recurrent states in which nothing moves by itself."""

    def _wait_for_load(self) -> None:
        self.loads.run()
        super()._wait_for_load()

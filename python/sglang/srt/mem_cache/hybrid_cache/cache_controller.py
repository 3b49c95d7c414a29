"""Moves pages between the tiers. It stands in `managers` because upstream has it there, but it
belongs to `mem_cache`: it imports no other file of `managers` and never a tree.

The scheduler thread queues copies here, starts them once a tick, and looks at their
acknowledgements; it decides nothing from their progress but through the ballot of its caller.
Threads and streams: a write stream (L1 to L2) and a load stream (L2 to L1), both `CopyStream`s;
the two threads of `StorageIO` while an L3 backend is attached.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.l3.storage_groups import pages_per_read
from sglang.srt.mem_cache.l3.storage_io import StorageIO
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import StorageUnreachable
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.utils.device import CopyStream, Event, HostCopies, make_event
from sglang.srt.utils.threads import give_way, share_interpreter

logger = logging.getLogger(__name__)

_WAIT_BOUND_S = 300.0
_WAIT_STEP_S = 1.0
_PAGES_AT_ONCE = 32
"""Of a write that goes on in pieces: some 2,000 copies of a large model, a millisecond."""


class LayerDoneCounter:
    """Orders the readers of each layer after the load that fills it.

    A load is a producer: it records an event per layer. A forward names the producer it must wait
    for; -1 is none. Threads: `update_producer`, `set_consumer` and `wait_until` run on the
    scheduler's (and the forward's) thread; events are recorded by the load stream.
    """

    def __init__(self, num_layers: int, device: torch.device | str) -> None:
        self.num_layers = num_layers
        self._device = device
        self._next = 0
        self._events: dict[int, list[Event]] = {}
        self._waiting_for: list[Event] | None = None

    def update_producer(self) -> tuple[int, list[Event]]:
        """A new load: its index, and one event per layer for it to record."""
        index = self._next
        self._next += 1
        self._events[index] = [make_event(self._device) for _ in range(self.num_layers)]
        return index, self._events[index]

    def set_consumer(self, index: int) -> None:
        """The next forward reads what load `index` brings; -1: no load."""
        self._waiting_for = self._events.pop(index, None)

    def wait_until(self, threshold: int) -> None:
        """Return when (or order the stream so that) layer `threshold` has been loaded."""
        if self._waiting_for is not None:
            self._waiting_for[threshold].wait()

    def reset(self) -> None:
        """Forget every load. None may be under way."""
        self._events.clear()
        self._waiting_for = None


@dataclass(frozen=True, slots=True)
class CacheOperation:
    """A copy that has been asked for: int64 slots of whole pages, equally many on each side."""

    operation_id: int
    host_indices: torch.Tensor
    device_indices: torch.Tensor


@dataclass(slots=True)
class _Locating:
    """Writes that begin once the CPU knows their device slots, and go on in pieces."""

    operations: list[CacheOperation]
    host: torch.Tensor
    device: HostCopies
    begun: int = 0
    """Tokens whose copies have been issued."""
    started: float = 0.0
    """`time.monotonic()` seconds of the first piece."""
    was_passed_over: bool = False


@dataclass(frozen=True, slots=True)
class HiCacheAck:
    """One copy under way for a whole tick's operations."""

    finish_event: Event
    operation_ids: list[int]
    num_tokens: int
    started: float
    """`time.monotonic()` seconds."""


class HiCacheController:
    """Queues and issues copies between L1 and L2, and holds the attachment to L3.

    Args:
        token_to_kv_pool_allocator: Allocator of L1, which knows the device pool.
        mem_pool_host: L2.
        page_size: Tokens.
        io_backend: Resolved; see host_layout.py.
        metrics: Counts what happened.
    """

    def __init__(
        self,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        mem_pool_host: HostPoolGroup,
        page_size: int,
        *,
        io_backend: str,
        metrics: HiCacheMetrics,
    ) -> None:
        self.mem_pool_device_allocator = token_to_kv_pool_allocator
        self.mem_pool_device = token_to_kv_pool_allocator.get_kvcache()
        self.mem_pool_host = mem_pool_host
        self.page_size = page_size
        self.io_backend = io_backend
        self._metrics = metrics
        device = self.mem_pool_device.device
        self.layer_done_counter = LayerDoneCounter(self.mem_pool_device.layer_num, device)
        self.mem_pool_device.register_layer_transfer_counter(self.layer_done_counter)
        self._write_stream = CopyStream(device, "hicache-write", is_urgent=False)
        self._load_stream = CopyStream(device, "hicache-load")
        self._next_id = 0
        self.write_queue: list[CacheOperation] = []
        self._locating: deque[_Locating] = deque()
        self.load_queue: list[CacheOperation] = []
        self.ack_write_queue: deque[HiCacheAck] = deque()
        self.ack_load_queue: deque[HiCacheAck] = deque()
        self.storage_io: StorageIO | None = None
        self._locates = mem_pool_host.prefers_cpu_slots(mem_pool_host.device_pool, io_backend)
        if device.type == "cuda":
            self._warm_up()
        else:
            # Writes have time: their pages stay where they are meanwhile, and the forward, which
            # the rest of its team would wait for, keeps its cores.
            self._write_stream.submit(give_way)

    def _warm_up(self) -> None:
        """Copy the padding page to the host and back, while nothing owns a page.

        Otherwise the first requests that use L2 wait for kernels to be compiled and for buffers.
        """
        page = torch.arange(self.page_size, dtype=torch.int64)
        on_device = page.to(self.mem_pool_device.device)
        written = page if self._locates else on_device
        layers = [
            make_event(self.mem_pool_device.device) for _ in range(self.mem_pool_host.layer_num)
        ]
        saved, loaded = (make_event(self.mem_pool_device.device) for _ in range(2))
        self._write_stream.submit(lambda: self._copy_to_host(page, written, saved))
        saved.synchronize()
        self._load_stream.submit(lambda: self._copy_to_device(page, on_device, layers, loaded))
        loaded.synchronize()

    # ---- L1 to L2 --------------------------------------------------------------------------

    def write(self, device_indices: torch.Tensor) -> CacheOperation | None:
        """Queue a copy of `device_indices` to fresh host pages; None: L2 is full.

        The caller keeps the device pages locked until the acknowledgement.
        """
        host_indices = self.mem_pool_host.alloc(len(device_indices))
        if host_indices is None:
            return None
        operation = CacheOperation(self._take_id(), host_indices, device_indices)
        self.write_queue.append(operation)
        return operation

    def start_writing(self, *, is_urgent: bool = False, soon: bool = False) -> None:
        """Issue everything queued as one copy.

        On a GPU the device slots of long pages are brought to the CPU first, behind the step that
        fills them; copy engines then take the pages from the pool, some at each call.

        Args:
            is_urgent: Wait for the slots, and issue everything.
            soon: Another call follows in this tick, and had better pay for what it takes the CPU.
        """
        if self.write_queue:
            operations, self.write_queue = self.write_queue, []
            slots = _joined([operation.device_indices for operation in operations])
            if self._locates:
                host = _joined([operation.host_indices for operation in operations])
                self._locating.append(_Locating(operations, host, HostCopies([slots])))
            else:
                ack = self._issue(operations, slots, self._write_stream, self._copy_to_host)
                self.ack_write_queue.append(ack)
        while self._locating and (is_urgent or self._locating[0].device.is_done):
            first = self._locating[0]
            if soon and not first.was_passed_over:
                first.was_passed_over = True
                break
            # Where more wait, they come faster than pieces go.
            self._write_more(first, whole=is_urgent or len(self._locating) > 1)
            if first.begun < len(first.host):
                break
            self._locating.popleft()

    def _write_more(self, write: _Locating, *, whole: bool) -> None:
        """Issue the next piece, or all the rest, of a write whose slots are known.

        A few pages at a time: each is some dozens of copies, and issuing those of a whole prefill
        takes the CPU longer than a decode step takes the device.
        """
        begin, total = write.begun, len(write.host)
        if begin == 0:
            write.started = time.monotonic()
        end = total if whole else min(begin + _PAGES_AT_ONCE * self.page_size, total)
        (device,) = write.device.wait()
        assert device is not None
        part = slice(begin, end)
        finish = make_event(self.mem_pool_device.device) if end == total else None
        # The step that fills them has ended: nothing to wait for.
        self._write_stream.submit(
            lambda: self._copy_to_host(write.host[part], device[part], finish),
            follows_caller=False,
        )
        write.begun = end
        if finish is not None:
            ids = [operation.operation_id for operation in write.operations]
            self.ack_write_queue.append(HiCacheAck(finish, ids, total, write.started))

    def _copy_to_host(self, host: torch.Tensor, device: torch.Tensor, finish: Event | None) -> None:
        self.mem_pool_host.backup_from_device_all_layer(
            self.mem_pool_host.device_pool, host, device, self.io_backend
        )
        if finish is not None:
            finish.record()

    # ---- L2 to L1 --------------------------------------------------------------------------

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> CacheOperation:
        """Queue a copy of host pages to reserved device slots.

        The caller pins the host pages and locks the device pages until the acknowledgement.
        """
        operation = CacheOperation(self._take_id(), host_indices, device_indices)
        self.load_queue.append(operation)
        return operation

    def start_loading(self) -> int:
        """Issue everything queued as one load; its producer index, -1 if nothing was queued."""
        if not self.load_queue:
            return -1
        index, layer_events = self.layer_done_counter.update_producer()

        def copy(host: torch.Tensor, device: torch.Tensor, finish: Event) -> None:
            self._copy_to_device(host, device, layer_events, finish)

        device = _joined([operation.device_indices for operation in self.load_queue])
        self.ack_load_queue.append(self._issue(self.load_queue, device, self._load_stream, copy))
        self.load_queue = []
        return index

    def _copy_to_device(
        self, host: torch.Tensor, device: torch.Tensor, layers: Sequence[Event], finish: Event
    ) -> None:
        for layer, event in enumerate(layers):
            self.mem_pool_host.load_to_device_per_layer(
                self.mem_pool_host.device_pool, host, device, layer, self.io_backend
            )
            event.record()
        finish.record()

    def _issue(
        self,
        operations: list[CacheOperation],
        device: torch.Tensor,
        stream: CopyStream,
        copy: Callable[[torch.Tensor, torch.Tensor, Event], None],
    ) -> HiCacheAck:
        """Begin one copy for all `operations`, whose device slots are `device`."""
        host = _joined([operation.host_indices for operation in operations])
        finish = make_event(self.mem_pool_device.device)
        ids = [operation.operation_id for operation in operations]
        ack = HiCacheAck(finish, ids, len(host), time.monotonic())
        stream.submit(lambda: copy(host, device, finish))
        return ack

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # ---- L3 --------------------------------------------------------------------------------

    def open_storage(
        self,
        connect: Callable[[], HiCacheStorage],
        settings: StorageSettings,
        namespace: str,
    ) -> StorageIO:
        """Connect to L3 and start its threads, to be attached or closed. Any thread.

        Args:
            connect: Makes a client with its pools registered.
            settings: Thresholds, and what to do if the store cannot be reached.
            namespace: First part of every key.

        Raises:
            ValueError: The configuration cannot work.
            StorageUnavailable: The store cannot be reached and the settings do not allow that.
        """
        if self.mem_pool_device.device.type != "cpu":
            share_interpreter()
        if settings.on_unreachable is OnUnreachable.WAIT:
            connect = _first_waiting(connect)
        return StorageIO(
            connect,
            namespace=namespace,
            page_size=self.page_size,
            page_bytes=self.mem_pool_host.page_bytes,
            pages_per_read=pages_per_read(self.mem_pool_host.page_num),
            threshold_pages=settings.threshold_pages(self.page_size),
            pass_prefix_keys=settings.pass_prefix_keys,
            metrics=self._metrics,
            degrade=settings.on_unreachable is OnUnreachable.DEGRADE,
        )

    def attach_storage_backend(self, storage_io: StorageIO) -> None:
        """Use an L3 from now on. Raises ValueError where one is attached already."""
        if self.storage_io is not None:
            raise ValueError("a storage backend is attached already; detach it first")
        self.storage_io = storage_io

    def detach_storage_backend(self) -> StorageIO | None:
        """Use L3 no longer. Its objects stay; no operation may be under way. Returns what is to be
        closed; None where nothing was attached."""
        storage_io, self.storage_io = self.storage_io, None
        self._metrics.breaker_open.set(0)
        return storage_io

    # ---- life ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Free every host page. Nothing may be queued or under way."""
        assert not (self.write_queue or self._locating or self.load_queue)
        assert not (self.ack_write_queue or self.ack_load_queue)
        self.mem_pool_host.clear()
        self.layer_done_counter.reset()

    def shutdown(self) -> None:
        """Detach L3 and end the copy threads, within seconds. Idempotent."""
        if (storage_io := self.detach_storage_backend()) is not None:
            storage_io.close()
        self._write_stream.close()
        self._load_stream.close()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _first_waiting(connect: Callable[[], HiCacheStorage]) -> Callable[[], HiCacheStorage]:
    """`connect`, retried within a bound while the store cannot be reached."""
    deadline = time.monotonic() + _WAIT_BOUND_S

    def waiting() -> HiCacheStorage:
        while True:
            try:
                return connect()
            except StorageUnreachable as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("waiting for L3 (on_unreachable=wait): %s", error)
                time.sleep(_WAIT_STEP_S)

    return waiting

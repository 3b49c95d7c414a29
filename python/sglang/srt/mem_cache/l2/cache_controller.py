"""Copies pages between L1 and L2, for all pools together.

The scheduler thread queues copies here, starts them once a tick, and reads their acknowledgements,
on which the ranks agree by the tick sync. A copy is a list of `PoolTransfer`s, the primary pool's
first; it is acknowledged when the bytes of all its transfers have landed. Threads and streams: a
write stream (L1 to L2) and a load stream (L2 to L1), both `CopyStream`s.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.hardware_backend.device_runtime import (
    CopyStream,
    Event,
    HostCopies,
    device_runtime,
)
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, join_transfers
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.host.page_checksums import PageDigests
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    _resolve_shared_pool_transfers,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_stack
from sglang.srt.mem_cache.l2.layer_done_counter import LayerDoneCounter
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_PAGES_AT_ONCE = 32
"""Pages in a piece of a write. A piece has a copy for each layer and part unless these form grids,
up to 2,000 for a large model; issuing them takes at most a millisecond."""


class HiCacheArgs(Protocol):
    """The server arguments that this cache reads."""

    hicache_ratio: float
    hicache_size: float
    hicache_host_memory_fraction: float | None
    hicache_host_memory_mode: str
    hicache_write_policy: str
    hicache_io_backend: str
    hicache_mem_layout: str
    hicache_storage_backend: str | None
    hicache_storage_prefetch_policy: str
    hicache_storage_prefetch_retry_max_attempts: int | None
    hicache_storage_prefetch_retry_poll_interval: int | None
    hicache_storage_backend_extra_config: str | None
    served_model_name: str | None


@dataclass(frozen=True, slots=True)
class CacheOperation:
    """A copy between L1 and L2, queued or under way."""

    operation_id: int
    transfers: list[PoolTransfer]
    """Transfers of the primary pool, the first, and of others with slots of their own. Each has
    int64 slots of whole pages, equally many on each side."""

    @property
    def host_indices(self) -> torch.Tensor:
        """The primary pool's host slots."""
        host = self.transfers[0].host_indices
        assert host is not None
        return host


@dataclass(slots=True)
class _Locating:
    """Writes that wait for their device slots to reach the CPU, and are then issued in pieces."""

    operations: list[CacheOperation]
    transfers: list[PoolTransfer]
    """Transfers of all operations, joined; the primary pool's first."""
    device: HostCopies
    """Copies of the device slots of each transfer to the CPU."""
    begun: int = 0
    """Tokens of the primary pool whose copies have been issued."""
    started: float = 0.0
    """`time.monotonic()` seconds of the first piece."""
    digests: list[PageDigests] = field(default_factory=list)
    was_passed_over: bool = False


@dataclass(frozen=True, slots=True)
class HiCacheAck:
    """A copy under way, shared by all operations of a tick."""

    finish_event: Event
    operation_ids: list[int]
    started: float
    """`time.monotonic()` seconds."""
    num_loads: int
    """Loads that were issued up to now, this one included."""
    digests: list[PageDigests] = field(default_factory=list)
    """Checksums of the pages on the device, until they are kept; complete when the copy has
    ended."""


class HiCacheController:
    """Queues and issues copies between L1 and L2.

    Args:
        token_to_kv_pool_allocator: Allocator of L1, which knows the device pool.
        mem_pool_host: Pools of L2.
        page_size: Tokens of a page.
        io_backend: Resolved I/O backend; see host_layout.py.
    """

    def __init__(
        self,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        mem_pool_host: HostPoolGroup,
        page_size: int,
        *,
        io_backend: str,
    ) -> None:
        self.mem_pool_device = token_to_kv_pool_allocator.get_kvcache()
        self.mem_pool_host = mem_pool_host
        self.page_size = page_size
        self.io_backend = io_backend
        device = self.mem_pool_device.device
        self._runtime = device_runtime(device)
        self.layer_done_counter = LayerDoneCounter(device)
        for entry in mem_pool_host.entries.values():
            entry.device_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._write_stream = self._runtime.make_copy_stream("hicache-write", is_urgent=False)
        self._load_stream = self._runtime.make_copy_stream("hicache-load")
        self._ids = itertools.count(1)
        self.write_queue: list[CacheOperation] = []
        self._locating: deque[_Locating] = deque()
        self.load_queue: list[CacheOperation] = []
        self.ack_write_queue: deque[HiCacheAck] = deque()
        self.ack_load_queue: deque[HiCacheAck] = deque()
        self._locates = mem_pool_host.prefers_cpu_slots(io_backend)
        if self._runtime.kind.warms_up:
            self._warm_up()

    def _warm_up(self) -> None:
        """Copy the padding page of every pool to the host and back, while no page is owned.

        Otherwise the first requests that use L2 would wait for kernels to compile and for buffers.
        """
        written, read = [], []
        for entry in self.mem_pool_host.entries.values():
            page = torch.arange(entry.host_pool.page_size, dtype=torch.int64)
            on_device = page.to(self.mem_pool_device.device)
            read.append(PoolTransfer(entry.name, page, on_device))
            written.append(PoolTransfer(entry.name, page, page if self._locates else on_device))
        group, io_backend = self.mem_pool_host, self.io_backend
        steps = group.load_steps(read, io_backend)
        done = [self._runtime.make_event() for _ in steps.issued]
        for stream, copy in (
            (self._write_stream, lambda: group.backup(written, io_backend)),
            (self._load_stream, lambda: group.load(read, steps, done, io_backend)),
        ):
            self._issue([], stream, copy).finish_event.synchronize()

    # ---- L1 to L2 --------------------------------------------------------------------------

    def write(
        self, device_indices: torch.Tensor, extra_transfers: Sequence[PoolTransfer] = ()
    ) -> CacheOperation | None:
        """Queue a copy of `device_indices` to fresh host pages; None: L2 is full.

        Host pages are taken in all pools or in none. The caller keeps the device pages of every
        pool locked until the acknowledgement.

        Args:
            device_indices: The primary pool's slots.
            extra_transfers: Transfers of other pools with slots of their own. They have
                `device_indices`. If `host_indices` is None, the host pool gives the slots; its
                `host_evict_fn` makes room. Transfers of pools that share slots are added
                automatically.
        """
        group = self.mem_pool_host
        host_indices = group.primary.alloc(len(device_indices))
        if host_indices is None:
            return None
        transfers = [PoolTransfer(group.primary_entry.name, host_indices, device_indices)]
        taken = transfers.copy()
        for transfer in extra_transfers:
            if transfer.host_indices is None and transfer.indices_from_pool is None:
                transfer.host_indices = self._alloc_host(transfer)
                if transfer.host_indices is None:
                    self._free_host(taken)
                    return None
                taken.append(transfer)
            transfers.append(transfer)
        operation = CacheOperation(next(self._ids), transfers)
        self.write_queue.append(operation)
        return operation

    def _alloc_host(self, transfer: PoolTransfer) -> torch.Tensor | None:
        assert transfer.device_indices is not None, f"{transfer.name}: nothing to write"
        entry = self.mem_pool_host.entries[transfer.name]
        needed = len(transfer.device_indices)
        missing = needed - entry.host_pool.available_size()
        if missing > 0 and entry.host_evict_fn is not None:
            entry.host_evict_fn(missing)
        return entry.host_pool.alloc(needed)

    def _free_host(self, transfers: Sequence[PoolTransfer]) -> None:
        for transfer in transfers:
            assert transfer.host_indices is not None
            self.mem_pool_host.get_pool(transfer.name).free(transfer.host_indices)
            transfer.host_indices = None

    def start_writing(self, *, is_urgent: bool = False, soon: bool = False) -> None:
        """Issue all queued writes as one copy.

        On a GPU the device slots of long pages are first copied to the CPU, after the step that
        fills them; copy engines then copy the pages, some at each call.

        Args:
            is_urgent: Wait for the slots, and issue all writes.
            soon: Another call follows in this tick; issue only writes that cannot wait for it.
        """
        if self.write_queue:
            operations, self.write_queue = self.write_queue, []
            if self._locates:
                transfers = join_transfers([operation.transfers for operation in operations])
                slots = [transfer.device_indices for transfer in transfers]
                located = self._runtime.copy_to_host(slots)
                self._locating.append(_Locating(operations, transfers, located))
            else:
                joined = self._joined(operations)
                ack = self._issue(
                    operations,
                    self._write_stream,
                    lambda: self.mem_pool_host.backup(joined, self.io_backend),
                )
                self.ack_write_queue.append(ack)
        while self._locating and (is_urgent or self._locating[0].device.is_done):
            first = self._locating[0]
            if soon and not first.was_passed_over:
                first.was_passed_over = True
                break
            # If more writes wait, they come faster than pieces are issued.
            self._write_more(first, whole=is_urgent or len(self._locating) > 1)
            if first.begun < _num_slots(first.transfers):
                break
            self._locating.popleft()

    def _write_more(self, write: _Locating, *, whole: bool) -> None:
        """Issue the next piece, or all the rest, of a write whose slots are known.

        A page takes some dozens of copies. Issuing all copies of a prefill at once would take the
        CPU longer than a decode step takes the device.
        """
        begin, total = write.begun, _num_slots(write.transfers)
        if begin == 0:
            write.started = time.monotonic()
        end = total if whole else min(begin + _PAGES_AT_ONCE * self.page_size, total)
        piece = _resolve_shared_pool_transfers(
            _piece_of(write, begin, end, is_last=end == total), self.mem_pool_host.auxiliary_pools
        )
        finish = self._runtime.make_event() if end == total else None

        def copy() -> None:
            write.digests += self.mem_pool_host.backup(piece, self.io_backend)
            if finish is not None:
                finish.record()

        # The step that fills the pages has ended, so the copy need not wait for it.
        self._write_stream.submit(copy, follows_caller=False)
        write.begun = end
        if finish is not None:
            ids = [operation.operation_id for operation in write.operations]
            self.ack_write_queue.append(
                HiCacheAck(finish, ids, write.started, self.num_loads, write.digests)
            )

    def keep_checksums(self, ack: HiCacheAck) -> None:
        """Keep the checksums of the pages of a write that has ended, before they are published.

        A second call does nothing. An eviction publishes pages before their write is settled, so
        that they may have other owners by then.
        """
        for one in ack.digests:
            checksums, digests = self.mem_pool_host.get_pool(one.pool).checksums, one.rows()
            if digests is None:
                checksums.forget(one.pages)
            else:
                checksums.keep(one.pages, digests)
        ack.digests.clear()

    # ---- L2 to L1 --------------------------------------------------------------------------

    @property
    def num_loads(self) -> int:
        """Loads that were issued since the start."""
        return self.layer_done_counter.num_producers

    @property
    def num_settled_loads(self) -> int:
        """Loads that have left `ack_load_queue`."""
        return self.num_loads - len(self.ack_load_queue)

    def load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        extra_transfers: Sequence[PoolTransfer] = (),
    ) -> CacheOperation:
        """Queue a copy of host pages to reserved device slots.

        The caller pins the host pages and locks the device pages of every pool until the
        acknowledgement.

        Args:
            host_indices: The primary pool's host slots.
            device_indices: Its device slots.
            extra_transfers: Transfers of other pools with slots of their own, with host and device
                slots.
        """
        name = self.mem_pool_host.primary_entry.name
        primary = PoolTransfer(name, host_indices, device_indices)
        operation = CacheOperation(next(self._ids), [primary, *extra_transfers])
        self.load_queue.append(operation)
        return operation

    def start_loading(self) -> int:
        """Issue all queued loads as one; return its producer index, -1 if none was queued."""
        if not self.load_queue:
            return -1
        operations, self.load_queue = self.load_queue, []
        group, transfers = self.mem_pool_host, self._joined(operations)
        steps = group.load_steps(transfers, self.io_backend)
        index, done = self.layer_done_counter.update_producer(steps.step_of)
        ack = self._issue(
            operations,
            self._load_stream,
            lambda: group.load(transfers, steps, done, self.io_backend),
        )
        self.ack_load_queue.append(ack)
        return index

    def _joined(self, operations: Sequence[CacheOperation]) -> list[PoolTransfer]:
        """The transfers of all pools, those without slots of their own included."""
        transfers = join_transfers([operation.transfers for operation in operations])
        auxiliary = self.mem_pool_host.auxiliary_pools
        return _resolve_shared_pool_transfers(transfers, auxiliary) if auxiliary else transfers

    def _issue(
        self,
        operations: list[CacheOperation],
        stream: CopyStream,
        copy: Callable[[], list[PageDigests]],
    ) -> HiCacheAck:
        """Start one copy for all `operations`."""
        ids = [operation.operation_id for operation in operations]
        ack = HiCacheAck(self._runtime.make_event(), ids, time.monotonic(), self.num_loads)

        def run() -> None:
            ack.digests.extend(copy())
            ack.finish_event.record()

        stream.submit(run)
        return ack

    # ---- start and end ---------------------------------------------------------------------

    def reset(self) -> None:
        """Free all host pages of all pools. No copy may be queued or under way."""
        assert not (self.write_queue or self._locating or self.load_queue)
        assert not (self.ack_write_queue or self.ack_load_queue)
        self.mem_pool_host.clear()
        self.layer_done_counter.reset()

    def shutdown(self) -> None:
        """End the copy threads, within seconds. Idempotent."""
        self._write_stream.close()
        self._load_stream.close()


def _num_slots(transfers: Sequence[PoolTransfer]) -> int:
    host = transfers[0].host_indices
    assert host is not None
    return len(host)


def _piece_of(write: _Locating, begin: int, end: int, *, is_last: bool) -> list[PoolTransfer]:
    """Transfers of the primary pool's tokens from `begin` to `end`. The last piece also
    has the transfers of other pools with slots of their own."""
    slots = write.device.wait()
    primary, host, device = write.transfers[0], write.transfers[0].host_indices, slots[0]
    assert host is not None and device is not None
    piece = [PoolTransfer(primary.name, host[begin:end], device[begin:end])]
    if is_last:
        rest = zip(write.transfers[1:], slots[1:], strict=True)
        piece += [replace(transfer, device_indices=on_cpu) for transfer, on_cpu in rest]
    return piece


def make_controller(
    params: CacheInitParams,
    server_args: HiCacheArgs,
    *,
    allocator_type: str,
    is_shared_by_sizes: bool,
) -> HiCacheController:
    """Build L2 and its controller; on all ranks or on none. `build_kv_host_stack` describes the
    last two arguments, and raises ValueError."""
    allocator, ranks = params.token_to_kv_pool_allocator, params.tp_cache_group
    io_backend, host_pool = build_kv_host_stack(
        params.model_pools or ModelPools.of([allocator.get_kvcache()]),
        ratio=server_args.hicache_ratio,
        size_gb=server_args.hicache_size,
        io_backend=server_args.hicache_io_backend,
        layout=server_args.hicache_mem_layout,
        has_storage=server_args.hicache_storage_backend is not None,
        is_shared_by_sizes=is_shared_by_sizes,
        allocator_type=allocator_type,
        ranks=ranks,
        host_memory_fraction=server_args.hicache_host_memory_fraction,
    )
    return on_all_ranks(
        ranks,
        lambda: HiCacheController(allocator, host_pool, params.page_size, io_backend=io_backend),
        HiCacheController.shutdown,
    )

"""The radix tree over device and host memory (L1 and L2).

Invariants beyond those of the tree (`check_integrity` asserts them):

- What is on the device is closed under `parent`; every node is on one tier at least.
- A node's host pages are set when their bytes have landed, never before.
- While a copy runs, its device pages are locked and its host pages are pinned or owned by the
  operation. An operation knows (node, length); where the node was split meanwhile, its upper parts
  are the ancestors that cover the length.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.mem_cache.hybrid_cache.cache_controller import (
    CacheOperation,
    HiCacheAck,
    HiCacheController,
)
from sglang.srt.mem_cache.tree.ballot import Progress, agree
from sglang.srt.mem_cache.tree.base_prefix_cache import EvictParams, EvictResult, InitLoadBackParams
from sglang.srt.mem_cache.tree.digest import Books, CacheBooks
from sglang.srt.mem_cache.tree.evict_policy import EvictionHeap
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.integrity import PageBooks
from sglang.srt.mem_cache.tree.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
_SELECTIVE_HITS: Final = 2


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way: `length` tokens that end at the end of `node`."""

    node: TreeNode
    length: int
    host_indices: torch.Tensor


class HostTierCache(RadixCache):
    """Prefix cache of two tiers.

    Args:
        params: As of every prefix cache.
        cache_controller: Moves the bytes; its host pool is L2.
        write_policy: One of `WRITE_POLICIES`.
        metrics: Counts what happened.
    """

    def __init__(
        self,
        params: CacheInitParams,
        cache_controller: HiCacheController,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
    ) -> None:
        super().__init__(params)
        self.cache_controller = cache_controller
        self.host_pool = cache_controller.mem_pool_host
        self.write_policy = write_policy
        self.metrics = metrics
        self._group = params.tp_cache_group
        self._books = CacheBooks(
            lambda: self.root_node,
            {
                "free tokens of L1": self.token_to_kv_pool_allocator.available_size,
                "free tokens of L2": self.host_pool.available_size,
            },
        )
        self._say = RateLimitedLogger(logger)
        self._host_heap = EvictionHeap(self.eviction_strategy, self._is_host_candidate)
        self._writing: dict[int, _Copy] = {}
        self._loading: dict[int, _Copy] = {}
        metrics.host_total.set(self.host_pool.size)

    def reset(self) -> None:
        """Empty L1 and L2. Raises AssertionError while anything is under way."""
        assert not self.is_busy(), f"cannot reset while busy: {self.is_busy()}"
        super().reset()
        self._host_heap.clear()
        self.cache_controller.reset()

    def shutdown(self) -> None:
        self.cache_controller.shutdown()

    def is_busy(self) -> dict[str, int]:
        counts = {"writes": len(self._writing), "loads": len(self._loading)}
        # A copy that nobody waits for any more still holds its place in the queue.
        counts["writes"] += len(self.cache_controller.ack_write_queue) if not self._writing else 0
        return {kind: count for kind, count in counts.items() if count}

    def _has_operations(self) -> bool:
        """Whether anything is unacknowledged: `is_busy`, asked at every tick."""
        return bool(self._writing or self._loading or self.cache_controller.ack_write_queue)

    def read_metrics(self) -> None:
        """Bring up to date what is set when it is read."""
        used = self.host_pool.size - self.host_pool.available_size()
        self.metrics.set_state(used, self.is_busy())

    # ---- L1 to L2 --------------------------------------------------------------------------

    def _after_insert(self, path: list[TreeNode]) -> None:
        if self.write_policy == "write_back":
            return
        wanted = 1 if self.write_policy == "write_through" else _SELECTIVE_HITS
        for node in path:
            if node.backuped or node.write_id is not None:
                continue
            # Top down, and no further than the first that does not go: writes are prefix-closed.
            if (wanted > 1 and node.hit_count < wanted) or not self.write_backup(node):
                break

    def write_backup(self, node: TreeNode) -> bool:
        """Queue the copy of a node to the host; False where L2 has no room for it."""
        operation = self._queue_write(node)
        if operation is None:
            self._say.warning(
                "l2-full",
                "L2 is full of pages in use; %d tokens stay without a copy",
                len(node.key),
            )
            return False
        self.inc_lock_ref(node)
        node.write_id = operation.operation_id
        self._writing[operation.operation_id] = _Copy(node, len(node.key), operation.host_indices)
        return True

    def _queue_write(self, node: TreeNode) -> CacheOperation | None:
        assert node.value is not None and not node.backuped
        operation = self.cache_controller.write(node.value)
        if operation is None:
            missing = len(node.key) - self.host_pool.available_size()
            self.evict_host(missing)
            operation = self.cache_controller.write(node.value)
        return operation

    def _settle_write(self, copy: _Copy) -> None:
        """The bytes have landed: publish the host pages and let go of the device pages."""
        landed = []
        for node, begin, end in parts_of(copy.node, copy.length):
            node.write_id = None
            node.set_host_value(_part(copy.host_indices, begin, end))
            landed.append(node)
        for node in landed:
            self._host_heap.offer(node)
        self.dec_lock_ref(copy.node)
        self._on_host_landed(landed[::-1])

    def _on_host_landed(self, nodes: list[TreeNode]) -> None:
        """`nodes`, parents first, have reached the host. For the tier below."""

    # ---- L2 to L1 --------------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        chain: list[TreeNode] = []
        node = params.best_match_node
        while node.value is None and node.parent is not None:
            chain.append(node)
            node = node.parent
        above = node
        chain.reverse()
        if params.mem_quota is not None:
            while chain and sum(len(n.key) for n in chain) > params.mem_quota:
                chain.pop()
        slots = self._reserve_for_load(chain, above)
        if slots is None:
            return self._values_of([]), above
        hosts = [n.host_value for n in chain if n.host_value is not None]
        operation = self.cache_controller.load(torch.cat(hosts), slots)
        done = 0
        for node in chain:
            self._put_on_device(node, slots[done : done + len(node.key)].clone())
            done += len(node.key)
        last = chain[-1]
        self.inc_lock_ref(last)
        self._loading[operation.operation_id] = _Copy(last, done, operation.host_indices)
        self.metrics.load_back.inc(done)
        return slots, last

    def _reserve_for_load(self, chain: list[TreeNode], above: TreeNode) -> torch.Tensor | None:
        """Device slots for `chain`, whose host pages stay pinned; None: nothing or no room."""
        if not chain:
            return None
        needed = sum(len(node.key) for node in chain)
        for node in chain:
            node.protect_host()
        # Evicting to make room must not take what the chain hangs on.
        self.inc_lock_ref(above)
        allocator = self.token_to_kv_pool_allocator
        missing = needed - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots = allocator.alloc(needed)
        self.dec_lock_ref(above)
        if slots is None:
            for node in chain:
                self._unpin(node)
            self._say.info("l1-full", "no room in L1 to load %d tokens back from L2", needed)
        return slots

    def ready_to_load_host_cache(self) -> int:
        return self.cache_controller.start_loading()

    def _settle_load(self, copy: _Copy) -> None:
        for node, _, _ in parts_of(copy.node, copy.length):
            self._unpin(node)
        self.dec_lock_ref(copy.node)

    def _unpin(self, node: TreeNode) -> None:
        node.release_host()
        self._host_heap.offer(node)

    # ---- eviction --------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free device slots: pages with a host copy leave L1, others are dropped or written back.

        Under `write_back` it waits for those copies, so that the slots are free on return.
        """
        freed = 0
        while freed < params.num_tokens:
            more = self._evict_round(params.num_tokens - freed)
            freed += more
            if not more:
                break
        self.metrics.evicted.labels("device").inc(freed)
        return EvictResult(num_tokens_evicted=freed)

    def _evict_round(self, num_tokens: int) -> int:
        """Free at most what can go now: a node above one that is being written back must wait."""
        freed = 0
        leaving: list[TreeNode] = []
        kept: list[TreeNode] = []
        slots: list[torch.Tensor] = []
        while freed < num_tokens and (node := self._device_heap.pop()) is not None:
            if node.backuped:
                freed += self._take_off_device(node)
                self._host_heap.offer(node)
            elif (value := self._write_back(node)) is not None:
                freed += len(value)
                slots.append(value)
                leaving.append(node)
            elif dropped := self._drop(node):
                freed += dropped
            else:
                kept.append(node)
        if leaving:
            self._finish_write_back(leaving, slots)
        for node in kept:
            self._device_heap.offer(node)
        return freed

    def _write_back(self, node: TreeNode) -> torch.Tensor | None:
        """Queue a node's copy and take it off the device's books; its slots, or None.

        Only where the copy is owed: under `write_back`, or because host pages hang below.
        """
        if self.write_policy != "write_back" and not node.children:
            return None
        operation = self._queue_write(node)
        if operation is None:
            return None
        value = node.value
        assert value is not None and node.parent is not None
        # Set before the bytes land, which nobody sees: `evict` waits for them.
        node.set_host_value(operation.host_indices)
        node.protect_host()
        node.set_value(None)
        self._evictable -= len(value)
        self._device_heap.offer(node.parent)
        return value

    def _finish_write_back(self, nodes: list[TreeNode], slots: list[torch.Tensor]) -> None:
        self.cache_controller.start_writing(is_urgent=True)
        self.cache_controller.ack_write_queue[-1].finish_event.synchronize()
        self._free_slots(torch.cat(slots))
        for node in nodes:
            self._unpin(node)
        # Leaves were taken first; L3 wants parents first.
        self._on_host_landed(nodes[::-1])

    def _drop(self, node: TreeNode) -> int:
        """Forget a node without a host copy, and the host pages below it; device tokens freed.

        0 where something below is pinned: the node stays.
        """
        below = [node]
        for at in below:
            below.extend(at.children.values())
        if any(at.host_ref_counter for at in below):
            return 0
        freed = self._take_off_device(node)
        for at in reversed(below):
            if at.host_value is not None:
                self.host_pool.free(at.host_value)
                at.set_host_value(None)
            self._delete_node(at)
        lost = sum(len(at.key) for at in below)
        self.metrics.dropped.labels("unwritten").inc(lost)
        self._say.info("drop", "%d tokens left L1 without a copy in L2", lost)
        return freed

    def evict_host(self, num_tokens: int) -> int:
        """Free host pages that nothing pins, at least `num_tokens` if there are; tokens freed."""
        slots: list[torch.Tensor] = []
        freed = 0
        while freed < num_tokens and (node := self._host_heap.pop()) is not None:
            assert node.host_value is not None and node.parent is not None
            parent = node.parent
            slots.append(node.host_value)
            freed += len(node.key)
            node.set_host_value(None)
            if node.value is None:
                self._delete_node(node)
            self._host_heap.offer(parent)
        if slots:
            self.host_pool.free(torch.cat(slots))
            self.metrics.evicted.labels("host").inc(freed)
        return freed

    def _refresh(self, node: TreeNode) -> None:
        super()._refresh(node)
        self._host_heap.refresh(node)

    def _is_host_candidate(self, node: TreeNode) -> bool:
        return (
            node.parent is not None
            and node.host_value is not None
            and node.host_ref_counter == 0
            and node.host_children == 0
        )

    # ---- one tick --------------------------------------------------------------------------

    @property
    def needs_tick(self) -> bool:
        return self._has_operations()

    def watch_queues(self, queues: Books) -> None:
        self._books.queues = queues

    def start_writing_host_cache(self) -> None:
        self.cache_controller.start_writing()

    def check_hicache_events(self) -> None:
        self.cache_controller.start_writing(soon=True)
        if self._has_operations():
            self._act_on(agree(self._progress(), self._group, self._books))

    def _progress(self) -> Progress:
        controller = self.cache_controller
        return Progress(
            writes=_reached(controller.ack_write_queue), loads=_reached(controller.ack_load_queue)
        )

    def _act_on(self, agreed: Progress) -> None:
        controller = self.cache_controller
        for _ in range(agreed.writes):
            ack = controller.ack_write_queue.popleft()
            self.metrics.transfer_seconds.labels("write").observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                # Absent: an eviction has waited for it and settled it.
                if (copy := self._writing.pop(operation_id, None)) is not None:
                    self._settle_write(copy)
        for _ in range(agreed.loads):
            ack = controller.ack_load_queue.popleft()
            self.metrics.load_back_seconds.observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                self._settle_load(self._loading.pop(operation_id))

    # ---- books -----------------------------------------------------------------------------

    def check_integrity(self, request_slots: Iterable[torch.Tensor] = ()) -> None:
        super().check_integrity(request_slots)
        self.host_pool.check_integrity()
        books = PageBooks("host", self.host_pool.size, self.page_size)
        books.own_pages("the free list", self.host_pool.free_page_ids())
        for node in self.nodes():
            books.own(repr(node), node.host_value)
            if self._is_host_candidate(node):
                assert node in self._host_heap, f"{node} could leave the host but is not offered"
        for owner, pages in self._host_pages_of_operations():
            books.own(owner, pages)
        books.check()

    def _host_pages_of_operations(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Host pages that operations own: not visible in the tree."""
        for operation_id, copy in self._writing.items():
            yield f"write {operation_id}", copy.host_indices


def parts_of(node: TreeNode, length: int) -> Iterator[tuple[TreeNode, int, int]]:
    """The nodes that cover the `length` tokens up to the end of `node`, lowest first.

    Each with the range of those tokens that it holds. More than one where splits came between.
    """
    end = length
    while end > 0:
        begin = end - len(node.key)
        assert begin >= 0 and node.parent is not None, "an operation starts inside a node"
        yield node, begin, end
        node, end = node.parent, begin


def _part(slots: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A range of `slots` that keeps nothing else of them alive."""
    whole = begin == 0 and end == len(slots)
    return slots if whole else slots[begin:end].clone()


def _reached(acks: Sequence[HiCacheAck]) -> int:
    """How many of the first copies have ended."""
    count = 0
    for ack in acks:
        if not ack.finish_event.query():
            break
        count += 1
    return count

"""The radix tree over L1 and L2 that reads from L3 what they lack.

`hicache_prefetch.py` has the book of the reads under way, `fetch_choice.py` decides which are worth
it, and `storage_io.py` has the thread that makes them. A failing L3 shortens a prefix, and never
fails a request.

Threads: the scheduler's only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sglang.srt.mem_cache.l3.fetch_choice import FetchChoice
from sglang.srt.mem_cache.l3.hicache_prefetch import PrefetchBoard, PrefetchPolicy, Read
from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tiers.host_tier_cache import HostTierCache
from sglang.srt.mem_cache.tree.ballot import Progress
from sglang.srt.mem_cache.tree.base_prefix_cache import Workload
from sglang.srt.mem_cache.tree.radix_key import ChildKey, PageHash, RadixKey, TokenArray
from sglang.srt.mem_cache.tree.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hybrid_cache.cache_controller import HiCacheController
    from sglang.srt.mem_cache.tiers.hicache_attachment import StorageAttachment
    from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics

_PREFETCH_SHARE: Final = 0.5
"""Of L2: reads under way may hold this much, so that they do not starve it."""


class PrefetchCache(HostTierCache):
    """Prefix cache of two tiers, and the reads from a third.

    Args:
        params: As of every prefix cache.
        cache_controller: As of `HostTierCache`; its `storage_io` is L3, if there is one.
        attachment: L3's settings.
        write_policy: As of `HostTierCache`.
        metrics: Counts what happened.
    """

    def __init__(
        self,
        params: CacheInitParams,
        cache_controller: HiCacheController,
        attachment: StorageAttachment,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
    ) -> None:
        super().__init__(params, cache_controller, write_policy=write_policy, metrics=metrics)
        self._attachment = attachment
        self._board = PrefetchBoard(self.page_size)
        self._choice = FetchChoice(self._board)
        self._loaded_from_storage: dict[str, int] = {}
        self._used: set[ChildKey] = set()
        """First pages of what was put on the device or used again since the last tick."""
        self._answers = True
        """As of the last ballot: no call to L3 is stuck on any rank."""
        self._storage_epoch = 0
        self._books.counts["epoch of L3"] = lambda: self._storage_epoch

    def is_busy(self) -> dict[str, int]:
        counts = super().is_busy()
        if len(self._board):
            counts["prefetches"] = len(self._board)
        return counts

    def _has_operations(self) -> bool:
        return bool(len(self._board)) or not self._answers or super()._has_operations()

    @property
    def _available(self) -> bool:
        """Whether L3 may be asked for anything."""
        return self._answers

    def read_metrics(self) -> None:
        super().read_metrics()
        self.metrics.host_stuck.set(self._board.stuck_tokens())

    def reset(self) -> None:
        super().reset()
        self._loaded_from_storage.clear()

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """What computing costs here: L3 is read only where that is not much faster."""
        storage_io = self.cache_controller.storage_io
        if storage_io is not None:
            storage_io.worth.prefills.add(tokens, seconds)

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        self._choice.watch(workload)

    # ---- a request comes -------------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | TokenArray,
        last_hash: PageHash | None = None,
        prefix_keys: list[PageHash] | None = None,
        *,
        extra_key: str | None = None,
        only_join: bool = False,
    ) -> None:
        """Read the pages that follow `last_host_node` in the prompt of `req_id`, which begins at
        the next tick. Those that are being read already are waited for and not read again.

        Args:
            last_host_node: As matched on arrival.
            new_input_tokens: The tokens after its end; those past the last whole page are ignored.
            last_hash: Hash of the node's last page, where the caller knows it.
            prefix_keys: Hashes of the pages before, where the caller knows them.
            extra_key: The request's.
            only_join: Read nothing that is not being read already.
        """
        if self.cache_controller.storage_io is None:
            return
        reason = self._join_or_read(
            req_id,
            last_host_node,
            RadixKey(new_input_tokens, extra_key).page_aligned(self.page_size),
            last_hash,
            prefix_keys,
            only_join=only_join,
        )
        if reason is not None:
            self.metrics.prefetch_outcomes.labels(reason).inc()
            if reason not in ("too_short", "joined", "sample", "miss"):
                self._say.info(f"no-prefetch-{reason}", "no L3 read for a prompt: %s", reason)

    def _join_or_read(
        self,
        req_id: str,
        node: TreeNode,
        new: RadixKey,
        last_hash: PageHash | None,
        prefix_keys: list[PageHash] | None,
        *,
        only_join: bool,
    ) -> str | None:
        """Why nothing is read for `new`, which follows `node`, or None."""
        is_root = node is self.root_node
        if node.parent is None and not is_root:
            # It has left the tree: what follows it could not be published.
            return "orphan"
        settings = self._attachment.settings
        least = settings.threshold_pages(self.page_size) * self.page_size
        if len(new) < least:
            return "too_short"
        if req_id in self._board:
            return "duplicate"
        if last_hash is None and not is_root:
            last_hash = node.page_hashes(self.page_size)[-1]
        above = _path_tokens(node)
        joined, rest, prior = self._board.join(req_id, new, len(above), last_hash)
        host_indices = None
        if only_join:
            reason = "sample"
        elif not len(rest):
            reason = CacheOutcome.MISS.value
        else:
            reason, host_indices = self._room_for_prefetch(req_id, node, len(rest), least)
        if host_indices is None:
            if joined >= least:
                return "joined"
            # Too few to be waited for.
            self._board.leave(req_id)
            return reason
        start = len(above) + joined
        key = RadixKey(np.concatenate([above, new.ids]), new.extra_key)[: start + len(host_indices)]
        if prefix_keys is None or joined:
            prefix = key[:start] if settings.pass_prefix_keys else key[:0]
            prefix_keys = prefix.page_hashes(self.page_size)
        operation = PrefetchOperation(
            request_id=req_id,
            key=key,
            start=start,
            host_indices=host_indices,
            hashes=key[start:].page_hashes(self.page_size, prior),
            prefix_hashes=prefix_keys,
            # It may be read after what was joined.
            deadline=time.monotonic() + self._attachment.prefetch_seconds(len(new)),
            epoch=self._storage_epoch,
        )
        self._board.start(operation)
        return None

    def _room_for_prefetch(
        self, req_id: str, node: TreeNode, wanted: int, least: int
    ) -> tuple[str, torch.Tensor | None]:
        """Host pages for a read of at most `wanted` tokens after `node`; else why there is none."""
        page = self.page_size
        if wanted < least:
            return "too_short", None
        if not self._available:
            return CacheOutcome.UNAVAILABLE.value, None
        share = int(_PREFETCH_SHARE * self.host_pool.size) - self._board.held_tokens()
        wanted = min(wanted, share // page * page)
        if self._board.is_full or wanted < least:
            return "queue_full", None
        if not self._choice.may_begin(req_id, wanted, self._attachment.prefetch_policy):
            return "slower_than_computing", None
        missing = wanted - self.host_pool.available_size()
        if missing > 0:
            # Not at the cost of what the read continues.
            node.protect_host()
            self.evict_host(missing)
            self._unpin(node)
            wanted = min(wanted, self.host_pool.available_size() // page * page)
        if wanted < least:
            return "no_host_memory", None
        return "", self.host_pool.alloc(wanted)

    # ---- it waits --------------------------------------------------------------------------

    def check_prefetch_progress(self, req_id: str) -> bool:
        if not self._board.may_schedule(req_id, self._attachment.prefetch_policy):
            return False
        for read in self._board.reads_of(req_id):
            # Only published: it is cut when the request is scheduled, which may be much later.
            new = self._publish(read, read.needs[req_id]) or 0
            if new:
                self._loaded_from_storage[req_id] = self._loaded_from_storage.get(req_id, 0) + new
            if new or read.progress.ended:
                self._settle_known(read)
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return self._loaded_from_storage.pop(req_id, 0)

    def _publish(self, read: Read, pages: int) -> int | None:
        """Put what has landed of the first `pages` of a read into the tree; how many tokens were
        new to it.

        The prompt is matched again: what others put there meanwhile stays theirs. None where the
        tree does not reach up to the read, so that nothing can be used.
        """
        operation = read.operation
        landed = min(pages, read.progress.landed) * self.page_size
        if not landed:
            return 0
        self._choice.note_read()
        end = operation.start + landed
        path = self._walk(operation.key[:end])
        known = sum(len(node.key) for node in path)
        begin = known - operation.start
        if begin < 0:
            return None
        if not begin < landed or not operation.owns(begin, landed):
            # Others have brought it, or what was published before has been evicted.
            return 0
        parent = path[-1] if path else self.root_node
        leaf = self._new_node(operation.key[known:end], parent)
        leaf.set_host_value(operation.publish(begin, landed))
        leaf.hash_value = operation.hashes[begin // self.page_size : landed // self.page_size]
        leaf.storage_epoch = operation.epoch
        self._host_heap.offer(leaf)
        return end - known

    def _settle_known(self, read: Read) -> None:
        """Mark what the tree has of a read for those who wait for it, and end what it need not
        bring any more."""
        operation = read.operation
        known = sum(len(node.key) for node in self._walk(operation.key))
        if known <= operation.start:
            return
        for pages in set(read.needs.values()):
            end = min(known, operation.start + pages * self.page_size)
            last = self._walk(operation.key[:end])[-1]
            for request_id, needed in read.needs.items():
                if needed == pages:
                    self._look_ahead.extend(request_id, last)
        self._board.note_known(read, known)

    def _after_insert(self, path: list[TreeNode]) -> None:
        super()._after_insert(path)
        if path and len(self._board):
            self._used.add(path[0].key.child_key(self.page_size))

    def _settle_used(self) -> None:
        """Look at the reads of prompts that begin like those that were computed since the last
        tick: the tree may have their pages now."""
        if self._used:
            for read in self._board.reads():
                if read.operation.key.child_key(self.page_size) in self._used:
                    self._settle_known(read)
            self._used.clear()

    # ---- it waits no more ------------------------------------------------------------------

    def note_scheduled(self, rid: str) -> None:
        super().note_scheduled(rid)
        self._leave(rid)

    def release_aborted_request(self, rid: str) -> None:
        super().release_aborted_request(rid)
        self._leave(rid)
        self._loaded_from_storage.pop(rid, None)

    def _leave(self, rid: str) -> None:
        """Cut the reads that nobody else waits for, and publish what has landed of them."""
        for read in self._board.leave(rid):
            if self._publish(read, read.progress.landed) is None:
                self.metrics.prefetch_outcomes.labels("orphan").inc()
            if not read.operation.ended and not read.operation.is_overtaken:
                landed = read.progress.landed * self.page_size
                self._say.info("late", "an L3 read was cut; %d tokens of it had landed", landed)

    # ---- one tick --------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        self._choice.begin_tick()
        self._submit_prefetches()
        super().check_hicache_events()

    def _submit_prefetches(self) -> None:
        """Hand on the reads of the prompts that have come since the last tick, as one question."""
        if started := self._board.take_new():
            storage_io = self.cache_controller.storage_io
            assert storage_io is not None, "L3 is detached when nothing is under way"
            storage_io.submit_prefetches(started)

    def _progress(self) -> Progress:
        progress = super()._progress()
        if self._attachment.prefetch_policy is not PrefetchPolicy.BEST_EFFORT:
            self._board.await_answers()
        progress.prefetches = self._board.progress()
        storage_io = self.cache_controller.storage_io
        if storage_io is not None:
            progress.available = storage_io.available
            progress.rates = storage_io.worth.rates()
        return progress

    def _act_on(self, agreed: Progress) -> None:
        super()._act_on(agreed)
        self._answers, self._choice.rates = agreed.available, agreed.rates
        for slots in self._board.agree(agreed.prefetches):
            self.host_pool.free(slots)
        self._settle_used()
        self._cut_overtaken()
        if not self._available and (stuck := self._board.stuck_tokens()):
            self._say.warning(
                "stuck", "an L3 read hangs: %d tokens of L2 stay with it until it returns", stuck
            )

    def _cut_overtaken(self) -> None:
        """Let requests go on whose prompts are computed before L3 would bring them."""
        for operation in self._choice.cut_overtaken(self._attachment.prefetch_policy):
            self._say.info(
                "overtaken",
                "an L3 read of %d tokens is cut: computing them is going to be sooner",
                len(operation.host_indices),
            )

    # ---- books -----------------------------------------------------------------------------

    def check_integrity(self, request_slots: Iterable[torch.Tensor] = ()) -> None:
        super().check_integrity(request_slots)
        self._board.check()

    def _host_pages_of_operations(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._host_pages_of_operations()
        for operation in self._board.operations():
            yield f"prefetch of {operation.request_id}", operation.owned_slots()


def _path_tokens(node: TreeNode) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Tokens from the root to the end of `node`."""
    parts = []
    while node.parent is not None:
        parts.append(node.key.ids)
        node = node.parent
    return np.concatenate([np.empty(0, dtype=np.uint32), *reversed(parts)])

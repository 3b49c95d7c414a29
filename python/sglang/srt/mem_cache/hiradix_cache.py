"""The radix tree over three tiers: what `host_tier_cache.py` does, and L3 below it.

This file says what is read from L3 and what is written to it; `storage_io.py` has the threads
that do it, `hicache_prefetch.py` the book of reads under way, and `fetch_choice.py` decides which
are worth it. L3 never fails a request: whatever it does shortens a prefix, and is counted with its
reason.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.ballot import MAX_SETTLED, Progress, Reduce, Verdict
from sglang.srt.mem_cache.base_prefix_cache import Workload
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.fetch_choice import FetchChoice
from sglang.srt.mem_cache.fetch_worth import Rates
from sglang.srt.mem_cache.hicache_administration import StorageAdministration
from sglang.srt.mem_cache.hicache_attachment import StorageAttachment, host_allocator_type
from sglang.srt.mem_cache.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.hicache_prefetch import PrefetchBoard, PrefetchPolicy
from sglang.srt.mem_cache.hicache_storage import CacheOutcome
from sglang.srt.mem_cache.host_tier_cache import HostTierCache, parts_of
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_stack
from sglang.srt.mem_cache.radix_key import PageHash, RadixKey, TokenArray
from sglang.srt.mem_cache.storage_operation import (
    CheckOperation,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.tree_node import TreeNode

logger = logging.getLogger(__name__)

_PREFETCH_SHARE: Final = 0.5
_BACKUP_SHARE: Final = 0.5
"""Of L2: reads and writes of L3 under way may hold this much each, so that neither starves L2."""
_CHECK_EVERY: Final = 61
"""Of the uses of prompts that L3 has, every so many may ask whether it still has them. A prime
number: of prompts that come in turn it takes each in time."""


class HiCacheArgs(Protocol):
    """The server arguments that this cache reads."""

    @property
    def hicache_ratio(self) -> float: ...
    @property
    def hicache_size(self) -> float: ...
    @property
    def hicache_write_policy(self) -> str: ...
    @property
    def hicache_io_backend(self) -> str: ...
    @property
    def hicache_mem_layout(self) -> str: ...
    @property
    def hicache_storage_backend(self) -> str | None: ...
    @property
    def hicache_storage_prefetch_policy(self) -> str: ...
    @property
    def hicache_storage_backend_extra_config(self) -> str | None: ...
    @property
    def served_model_name(self) -> str | None: ...


class HiRadixCache(HostTierCache):
    """Prefix cache of up to three tiers, built from the server's arguments.

    Raises:
        ValueError: A layout, size or policy that cannot work.
        StorageUnreachable: L3 cannot be reached and `on_unreachable` is `exit`.
    """

    def __init__(
        self, params: CacheInitParams, server_args: HiCacheArgs, reduce: Reduce | None = None
    ) -> None:
        metrics = HiCacheMetrics(params.metrics_registry)
        allocator = params.token_to_kv_pool_allocator
        io_backend, host_pool = build_kv_host_stack(
            allocator.get_kvcache(),
            ratio=server_args.hicache_ratio,
            size_gb=server_args.hicache_size,
            io_backend=server_args.hicache_io_backend,
            layout=server_args.hicache_mem_layout,
            has_storage=server_args.hicache_storage_backend is not None,
            allocator_type=host_allocator_type(
                server_args.hicache_storage_backend,
                server_args.hicache_storage_backend_extra_config,
            ),
        )
        controller = HiCacheController(
            allocator, host_pool, params.page_size, io_backend=io_backend, metrics=metrics
        )
        super().__init__(
            params,
            controller,
            write_policy=server_args.hicache_write_policy,
            metrics=metrics,
            reduce=reduce,
        )
        self._board = PrefetchBoard(self.page_size)
        self._choice = FetchChoice(self._board)
        self._backups: deque[StorageOperation] = deque()
        self._backup_tokens = 0
        self._postponed: dict[int, TreeNode] = {}
        """Nodes whose write to L3 waits for room among the writes under way, parents first."""
        self._check: CheckOperation | None = None
        self._uses_of_stored = 0
        self._loaded_from_storage: dict[str, int] = {}
        self._answers = True
        """As of the last ballot: no call to L3 is stuck on any rank."""
        self._reconnects = 0
        self._storage_epoch = 0
        self._attachment = StorageAttachment(
            controller,
            weights_identity=params.weights_identity,
            model_name=server_args.served_model_name,
            prefetch_policy=server_args.hicache_storage_prefetch_policy,
        )
        self.administration = StorageAdministration(self, self._attachment)
        """Changes of L3 at run time."""
        if server_args.hicache_storage_backend is not None:
            try:
                self._attachment.attach(
                    server_args.hicache_storage_backend,
                    server_args.hicache_storage_backend_extra_config,
                )
            except BaseException:
                controller.shutdown()
                raise

    def is_busy(self) -> dict[str, int]:
        counts = super().is_busy()
        if len(self._board):
            counts["prefetches"] = len(self._board)
        if self._backups or self._postponed:
            counts["backups"] = len(self._backups) + len(self._postponed)
        if self._check is not None:
            counts["checks"] = 1
        if self.administration.is_under_way:
            counts["administration"] = 1
        return counts

    @property
    def _available(self) -> bool:
        """Whether L3 may be asked for anything."""
        return self._answers and not self.administration.is_under_way

    def _has_operations(self) -> bool:
        return bool(
            len(self._board)
            or self._backups
            or self._postponed
            or self._check is not None
            or self.administration.is_under_way
            or not self._answers
            or super()._has_operations()
        )

    def read_metrics(self) -> None:
        super().read_metrics()
        self.metrics.host_stuck.set(self._board.stuck_tokens())

    def reset(self) -> None:
        super().reset()
        self._loaded_from_storage.clear()

    def shutdown(self) -> None:
        self.administration.give_up("the server is shutting down")
        super().shutdown()

    # ---- L3 to L2 --------------------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | TokenArray,
        last_hash: PageHash | None = None,
        prefix_keys: list[PageHash] | None = None,
        *,
        extra_key: str | None = None,
    ) -> None:
        """Read the pages that follow `last_host_node` in the prompt of `req_id`, which begins at
        the next tick.

        Args:
            last_host_node: As matched on arrival.
            new_input_tokens: The tokens after its end; those past the last whole page are ignored.
            last_hash: Hash of the node's last page, where the caller knows it.
            prefix_keys: Hashes of the pages before, where the caller knows them.
            extra_key: The request's.
        """
        storage_io = self.cache_controller.storage_io
        if storage_io is None:
            return
        new = RadixKey(new_input_tokens, extra_key).page_aligned(self.page_size)
        settings = self._attachment.settings
        least = settings.threshold_pages(self.page_size) * self.page_size
        reason, host_indices = self._room_for_prefetch(req_id, len(new), least)
        if host_indices is None:
            self.metrics.prefetch_outcomes.labels(reason).inc()
            if reason != "too_short":
                self._say.info(f"no-prefetch-{reason}", "no L3 read for a prompt: %s", reason)
            return
        new = new[: len(host_indices)]
        is_root = last_host_node.parent is None
        if last_hash is None and not is_root:
            last_hash = last_host_node.page_hashes(self.page_size)[-1]
        if prefix_keys is None and settings.pass_prefix_keys and not is_root:
            own = last_host_node.page_hashes(self.page_size)
            prefix_keys = [*last_host_node.get_prefix_hash_values(self.page_size), *own]
        above = _path_tokens(last_host_node)
        operation = PrefetchOperation(
            request_id=req_id,
            key=RadixKey(np.concatenate([above, new.ids]), extra_key),
            start=len(above),
            host_indices=host_indices,
            hashes=new.page_hashes(self.page_size, last_hash),
            prefix_hashes=prefix_keys or [],
            deadline=time.monotonic() + self._attachment.prefetch_seconds(len(new)),
            epoch=self._storage_epoch,
        )
        self._board.start(operation)

    def _room_for_prefetch(
        self, req_id: str, wanted: int, least: int
    ) -> tuple[str, torch.Tensor | None]:
        """Host pages for a read of at most `wanted` tokens; else why there is none."""
        if wanted < least:
            return "too_short", None
        if req_id in self._board:
            return "duplicate", None
        if not self._available:
            return CacheOutcome.UNAVAILABLE.value, None
        page = self.page_size
        share = int(_PREFETCH_SHARE * self.host_pool.size) - self._board.held_tokens()
        wanted = min(wanted, share // page * page)
        if self._board.is_full or wanted < least:
            return "queue_full", None
        if not self._choice.may_begin(req_id, wanted, self._attachment.prefetch_policy):
            return "slower_than_computing", None
        missing = wanted - self.host_pool.available_size()
        if missing > 0:
            self.evict_host(missing)
            wanted = min(wanted, self.host_pool.available_size() // page * page)
        if wanted < least:
            return "no_host_memory", None
        return "", self.host_pool.alloc(wanted)

    def check_prefetch_progress(self, req_id: str) -> bool:
        if not self._board.may_schedule(req_id, self._attachment.prefetch_policy):
            return False
        self._finish_prefetch(req_id)
        return True

    def release_aborted_request(self, rid: str) -> None:
        super().release_aborted_request(rid)
        self._finish_prefetch(rid)
        self._loaded_from_storage.pop(rid, None)

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return self._loaded_from_storage.pop(req_id, 0)

    def _finish_prefetch(self, req_id: str) -> None:
        """Cut the read of `req_id`, if there is one, and publish what has landed."""
        finished = self._board.finish(req_id)
        if finished is None:
            return
        operation, landed_pages = finished
        if landed_pages:
            self._choice.note_read()
        published = self._publish(operation, landed_pages * self.page_size)
        if published:
            self._loaded_from_storage[req_id] = published
        if not operation.ended and not operation.is_overtaken:
            self._say.info("late", "an L3 read was cut; %d tokens of it are used", published)

    def _publish(self, operation: PrefetchOperation, landed: int) -> int:
        """Put the `landed` first tokens of a read into the tree; how many were new to it.

        The prompt is matched again: what others put there meanwhile stays theirs, and where the
        node that the read continues has gone, the pages are orphans and not used.
        """
        end = operation.start + landed
        path = self._walk(operation.key[:end])
        known = sum(len(node.key) for node in path)
        if known < operation.start or known >= end:
            if landed and known < operation.start:
                self.metrics.prefetch_outcomes.labels("orphan").inc()
            return 0
        begin = known - operation.start
        parent = path[-1] if path else self.root_node
        leaf = self._new_node(operation.key[known:end], parent)
        leaf.set_host_value(operation.publish(begin, landed))
        leaf.hash_value = operation.hashes[begin // self.page_size : landed // self.page_size]
        leaf.storage_epoch = operation.epoch
        self._host_heap.offer(leaf)
        return end - known

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """What computing costs here: L3 is read only where that is not much faster."""
        storage_io = self.cache_controller.storage_io
        if storage_io is not None:
            storage_io.worth.prefills.add(tokens, seconds)

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        self._choice.watch(workload)

    def _cut_overtaken(self) -> None:
        """Let requests go on whose prompts are computed before L3 would bring them."""
        for operation in self._choice.cut_overtaken(self._attachment.prefetch_policy):
            self._say.info(
                "overtaken",
                "an L3 read of %d tokens is cut: computing them is going to be sooner",
                len(operation.host_indices),
            )

    # ---- L2 to L3 --------------------------------------------------------------------------

    def _after_insert(self, path: list[TreeNode]) -> None:
        super()._after_insert(path)
        if self.cache_controller.storage_io is not None:
            self._check_now_and_then(path)
            # What an L3 that was attached, came back or lost pages since does not have.
            self._back_up([node for node in path if node.backuped])

    def _check_now_and_then(self, path: list[TreeNode]) -> None:
        """Ask L3 whether it still has what is used here, once in a while.

        A page that it has is not written again, and while it is in L1 or L2 it is not asked for
        either: nothing else would tell that the store was restarted, or has evicted it. Counted
        and not timed, so that all ranks ask at the same tick.
        """
        if not path or not self._is_stored(path[0]):
            return
        self._uses_of_stored += 1
        if self._uses_of_stored % _CHECK_EVERY or self._check is not None or not self._available:
            return
        storage_io = self.cache_controller.storage_io
        assert storage_io is not None
        stored = itertools.takewhile(self._is_stored, path)
        hashes = [page for node in stored for page in node.page_hashes(self.page_size)]
        self._check = CheckOperation(hashes, self._storage_epoch)
        storage_io.submit_check(self._check)

    def _on_host_landed(self, nodes: list[TreeNode]) -> None:
        if self.cache_controller.storage_io is None:
            return
        self._back_up(nodes)
        # Under write_back whole branches may have landed before what they hang on.
        below = deque(child for node in nodes for child in node.children.values())
        while below:
            node = below.popleft()
            if node.backuped and not self._is_stored(node) and node.backup_op is None:
                self._back_up([node])
                if node.backup_op is not None or node.id in self._postponed:
                    below.extend(node.children.values())

    def _back_up(self, nodes: list[TreeNode]) -> None:
        for node in nodes:
            if self._is_stored(node) or node.backup_op is not None or node.id in self._postponed:
                continue
            reason = self.write_backup_storage(node)
            if reason == "queue_full":
                self._postponed[node.id] = node
            elif reason is not None:
                self.metrics.backup_outcomes.labels(reason).inc()

    def _is_stored(self, node: TreeNode) -> bool:
        return node.parent is None or node.storage_epoch == self._storage_epoch

    def _resume_postponed(self) -> None:
        """Queue the writes for which there was no room, in their order, as far as there is now."""
        while self._postponed:
            node = next(iter(self._postponed.values()))
            if node.parent is None:
                # It left the tree while it waited.
                self.metrics.backup_outcomes.labels("evicted").inc()
            for part in self._unsaved_path(node):
                reason = self.write_backup_storage(part) if part.backuped else "evicted"
                if reason == "queue_full":
                    return
                if reason is not None:
                    self.metrics.backup_outcomes.labels(reason).inc()
                    break
            del self._postponed[node.id]

    def _unsaved_path(self, node: TreeNode) -> list[TreeNode]:
        """`node` and what was split off above it since it was postponed, top first."""
        path: list[TreeNode] = []
        while node.parent is not None and not self._is_stored(node) and node.backup_op is None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def write_backup_storage(self, node: TreeNode) -> str | None:
        """Queue the write of a node's host pages to L3; None, or the reason why not.

        `queue_full` means not now; every other reason is final until the node is used again.
        """
        storage_io = self.cache_controller.storage_io
        assert storage_io is not None and node.host_value is not None
        assert node.parent is not None
        above = node.parent
        if not self._is_stored(above) and above.backup_op is None:
            return "queue_full" if above.id in self._postponed else "orphan"
        if not above.backuped_from_root:
            # A page above that could only be dropped could not leave L1 while this write hangs.
            # When it reaches the host it brings these along.
            return "orphan"
        if not self._available:
            return CacheOutcome.UNAVAILABLE.value
        share = _BACKUP_SHARE * self.host_pool.size
        # A node larger than the share goes alone: waiting would not make it smaller.
        if self._backup_tokens and self._backup_tokens + len(node.key) > share:
            return "queue_full"
        prefix: list[PageHash] = []
        if self._attachment.settings.pass_prefix_keys:
            prefix = node.get_prefix_hash_values(self.page_size)
        operation = StorageOperation(
            node=node,
            host_indices=node.host_value,
            hashes=node.page_hashes(self.page_size),
            prefix_hashes=prefix,
            after=above.backup_op,
            epoch=self._storage_epoch,
        )
        node.protect_host()
        node.backup_op = operation
        self._backups.append(operation)
        self._backup_tokens += len(node.key)
        storage_io.submit_backup(operation)
        return None

    def _settle_backup(self, *, success: bool) -> None:
        operation = self._backups.popleft()
        length = len(operation.host_indices)
        self._backup_tokens -= length
        for node, _, _ in parts_of(operation.node, length):
            node.backup_op = None
            if success:
                # Of its start: a store that was lost meanwhile may have lost this as well.
                node.storage_epoch = operation.epoch
            self._unpin(node)

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
        ended = itertools.takewhile(lambda one: one.ended, self._backups)
        progress.backups = [
            Verdict.on(is_good=bool(one.outcome)) for one in itertools.islice(ended, MAX_SETTLED)
        ]
        if self._check is not None and self._check.outcome is not None:
            progress.check = Verdict.on(is_good=bool(self._check.outcome))
        storage_io = self.cache_controller.storage_io
        if storage_io is not None:
            progress.available = storage_io.available
            progress.rates = storage_io.worth.rates()
            progress.reconnects = storage_io.reconnects
        progress.administration = self.administration.progress()
        return progress

    def _act_on(self, agreed: Progress) -> None:
        super()._act_on(agreed)
        self._choice.rates = agreed.rates
        self.administration.settle(agreed.administration)
        self._answers = agreed.available
        for verdict in agreed.backups:
            self._settle_backup(success=verdict is Verdict.LANDED)
        self._resume_postponed()
        if agreed.reconnects != self._reconnects:
            self._reconnects = agreed.reconnects
            self._storage_epoch += 1
        if (check := self._check) is not None and agreed.check is not Verdict.UNDER_WAY:
            self._check = None
            if agreed.check is Verdict.FAILED and check.epoch == self._storage_epoch:
                self._storage_epoch += 1
        for slots in self._board.agree(agreed.prefetches):
            self.host_pool.free(slots)
        self._cut_overtaken()
        if not self._available and (stuck := self._board.stuck_tokens()):
            self._say.warning(
                "stuck", "an L3 read hangs: %d tokens of L2 stay with it until it returns", stuck
            )

    # ---- administration --------------------------------------------------------------------

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach L3, or change the policies of the one that is attached, and wait for the end.

        Returns whether it was done, and what or why not.
        """
        return self._change_storage(
            lambda: self.administration.begin_attaching(
                storage_backend,
                storage_backend_extra_config_json,
                hicache_storage_prefetch_policy,
                hicache_write_policy,
            )
        )

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Let go of L3, and wait for the end; its objects and the policies stay. Idempotent."""
        return self._change_storage(self.administration.begin_detaching)

    def clear_storage_backend(self) -> tuple[bool, str]:
        """Remove this namespace's objects from L3, and wait for the end."""
        return self._change_storage(self.administration.begin_clearing)

    def _change_storage(self, begin: Callable[[], None]) -> tuple[bool, str]:
        try:
            begin()
        except ValueError as error:
            return False, str(error)
        return self.administration.wait(self.check_hicache_events)

    def forget_stored(self) -> None:
        """L3 is another one, or has been cleared: nothing counts as stored any more."""
        self._storage_epoch += 1
        self._choice.rates = Rates()

    def storage_state(self) -> dict[str, Any]:
        """For `GET /hicache/storage-backend`: backend, its config without secrets, policies."""
        return {**self._attachment.state(), "hicache_write_policy": self.write_policy}

    @property
    def storage_backend_name(self) -> str | None:
        """Class name of the backend, as `cached_tokens_details` shows it."""
        storage_io = self.cache_controller.storage_io
        return storage_io.backend_name if storage_io is not None else None

    def tiers(self) -> list[str]:
        """One line per tier below L1: its size, and why that size."""
        pool = self.host_pool
        host = (
            f"L2: {pool.size} tokens, {pool.page_num * pool.page_bytes / 1e9:.2f} GB of host "
            f"memory in layout {pool.layout}, I/O {self.cache_controller.io_backend}"
        )
        return [host, self._attachment.describe()]

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

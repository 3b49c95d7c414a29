"""The radix tree over three tiers, built from the server's arguments.

`prefetch_cache.py` says what is read from L3, this file what is written to it; `storage_io.py` has
the threads that do it. L3 never fails a request: whatever it does shortens a prefix, and is counted
with its reason.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from sglang.srt.mem_cache.hybrid_cache.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_stack
from sglang.srt.mem_cache.l3.storage_operation import CheckOperation, StorageOperation
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tiers.hicache_administration import StorageAdministration
from sglang.srt.mem_cache.tiers.hicache_attachment import StorageAttachment, host_allocator_type
from sglang.srt.mem_cache.tiers.host_tier_cache import parts_of
from sglang.srt.mem_cache.tiers.prefetch_cache import PrefetchCache
from sglang.srt.mem_cache.tree.ballot import MAX_SETTLED, Progress, Rates, Verdict
from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.mem_cache.tree.tree_node import TreeNode

logger = logging.getLogger(__name__)

_BACKUP_SHARE: Final = 0.5
"""Of L2: writes to L3 under way may hold this much, so that they do not starve it."""
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


class HiRadixCache(PrefetchCache):
    """Prefix cache of up to three tiers, built from the server's arguments.

    Raises:
        ValueError: A layout, size or policy that cannot work.
        StorageUnreachable: L3 cannot be reached and `on_unreachable` is `exit`.
    """

    def __init__(self, params: CacheInitParams, server_args: HiCacheArgs) -> None:
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
        attachment = StorageAttachment(
            controller,
            group=params.tp_cache_group,
            weights_identity=params.weights_identity,
            model_name=server_args.served_model_name,
            prefetch_policy=server_args.hicache_storage_prefetch_policy,
        )
        super().__init__(
            params,
            controller,
            attachment,
            write_policy=server_args.hicache_write_policy,
            metrics=metrics,
        )
        self._backups: deque[StorageOperation] = deque()
        self._backup_tokens = 0
        self._postponed: dict[int, TreeNode] = {}
        """Nodes whose write to L3 waits for room among the writes under way, parents first."""
        self._check: CheckOperation | None = None
        self._uses_of_stored = 0
        self._seen_reconnects = self._agreed_reconnects = 0
        """How often L3 came back on this rank: as told to the others, and as agreed by all."""
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
        return super()._available and not self.administration.is_under_way

    def _has_operations(self) -> bool:
        return bool(
            self._backups
            or self._postponed
            or self._check is not None
            or self.administration.is_under_way
            or super()._has_operations()
        )

    def shutdown(self) -> None:
        self.administration.give_up("the server is shutting down")
        super().shutdown()

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

    def _settle_backup(self, operation: StorageOperation, *, success: bool) -> None:
        length = len(operation.host_indices)
        self._backup_tokens -= length
        for node, _, _ in parts_of(operation.node, length):
            node.backup_op = None
            if success:
                # Of its start: a store that was lost meanwhile may have lost this as well.
                node.storage_epoch = operation.epoch
            self._unpin(node)

    def _give_up_below(self, refused: set[TreeNode]) -> None:
        """Nothing that follows a page that was refused is written, also where it waits for room."""
        for node in list(self._postponed.values()):
            above: TreeNode | None = node
            while above is not None and above not in refused:
                above = above.parent
            if above is not None:
                del self._postponed[node.id]
                self.metrics.backup_outcomes.labels(CacheOutcome.SHORT.value).inc()

    # ---- one tick --------------------------------------------------------------------------

    def _progress(self) -> Progress:
        progress = super()._progress()
        ended = itertools.takewhile(lambda one: one.ended, self._backups)
        progress.backups = [
            Verdict.on(is_good=bool(one.outcome)) for one in itertools.islice(ended, MAX_SETTLED)
        ]
        if self._check is not None and self._check.outcome is not None:
            progress.check = Verdict.on(is_good=bool(self._check.outcome))
        storage_io = self.cache_controller.storage_io
        if storage_io is not None:
            self._seen_reconnects = storage_io.reconnects
            progress.has_reconnected = self._seen_reconnects != self._agreed_reconnects
        progress.administration = self.administration.progress()
        return progress

    def _act_on(self, agreed: Progress) -> None:
        super()._act_on(agreed)
        self.administration.settle(agreed.administration)
        refused: set[TreeNode] = set()
        for verdict in agreed.backups:
            operation = self._backups.popleft()
            self._settle_backup(operation, success=verdict is Verdict.LANDED)
            if verdict is Verdict.FAILED:
                refused.add(operation.node)
        if refused:
            self._give_up_below(refused)
        self._resume_postponed()
        if agreed.has_reconnected:
            self._agreed_reconnects = self._seen_reconnects
            self._storage_epoch += 1
        if (check := self._check) is not None and agreed.check is not Verdict.UNDER_WAY:
            self._check = None
            if agreed.check is Verdict.FAILED and check.epoch == self._storage_epoch:
                self._storage_epoch += 1

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

"""The prefix cache of up to three tiers: the tree, and the flows between its tiers.

`docs/hicache.md` describes the way of a page down and up. L3 never fails a request: its failures
only shorten a prefix, and are counted with their reasons.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, Lookup, Workload
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.l2.cache_controller import HiCacheArgs, make_controller
from sglang.srt.mem_cache.l2.eviction_to_host import EvictionToHost
from sglang.srt.mem_cache.l2.host_backup import HostBackup
from sglang.srt.mem_cache.l2.host_load import HostLoad, NoLoad
from sglang.srt.mem_cache.l3.buffered_backup import BufferedBackup
from sglang.srt.mem_cache.l3.hicache_administration import ChangeResult, StorageAdministration
from sglang.srt.mem_cache.l3.request_reads import RequestReads
from sglang.srt.mem_cache.l3.storage_backup import StorageBackup
from sglang.srt.mem_cache.l3.storage_prefetch import StoragePrefetch
from sglang.srt.mem_cache.l3.storage_reads import LookUpRetries
from sglang.srt.mem_cache.l3.store_connection import StoreConnection, demands_on_host_pools
from sglang.srt.mem_cache.radix_cache import RadixCache, make_tree
from sglang.srt.mem_cache.tree.hicache_metrics import QUEUES, HiCacheMetrics
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks
from sglang.srt.mem_cache.tree.pool_tier import PoolTier
from sglang.srt.mem_cache.tree.radix_key import PageHash, TokenArray
from sglang.srt.mem_cache.tree.replicated_state import CacheState, ReplicatedState
from sglang.srt.mem_cache.tree.tick_sync import Progress, TickSync
from sglang.srt.mem_cache.tree.tier_use import HostUse, host_use
from sglang.srt.mem_cache.tree.tree_node import TreeNode, tokens_of
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.utils.parts import Parts


class HiRadixCache(RadixCache):
    """Prefix cache of up to three tiers, built from the server's arguments. Construction is a
    collective: if one rank has no memory for it, all ranks raise.

    Raises:
        ValueError: A layout, size or policy cannot work. An error on one of several ranks is
            raised on all, with the name of that rank.
        StorageUnreachable: L3 cannot be reached and `on_unreachable` is `exit`.

    Attributes:
        administration: Changes of L3 at run time.
        cache_controller: Controller of copies.
        host_pool: The primary pool in L2.
        eviction: Eviction from L1.
        host_backup, host_load, storage_backup, storage_prefetch: The flows down and up.
        request_reads: What waiting requests get from L3.
    """

    metrics: HiCacheMetrics

    def __init__(self, params: CacheInitParams, server_args: HiCacheArgs) -> None:
        tree = make_tree(params)
        metrics = HiCacheMetrics(params.metrics_registry)
        self._group = params.tp_cache_group
        backend = server_args.hicache_storage_backend
        extra_config = server_args.hicache_storage_backend_extra_config
        allocator_type, is_shared_by_sizes = on_all_ranks(
            self._group, lambda: demands_on_host_pools(backend, extra_config)
        )
        controller = self.cache_controller = make_controller(
            params,
            server_args,
            allocator_type=allocator_type,
            is_shared_by_sizes=is_shared_by_sizes,
        )
        self._create_prefetch_sync_groups()
        self.host_pool = controller.mem_pool_host.primary
        store = self.store = StoreConnection(
            controller.mem_pool_host,
            params.page_size,
            self._group,
            weights_identity=params.weights_identity,
            model_name=server_args.served_model_name,
            prefetch_policy=server_args.hicache_storage_prefetch_policy,
            metrics=metrics,
            retries=LookUpRetries.of(
                server_args.hicache_storage_prefetch_retry_max_attempts,
                server_args.hicache_storage_prefetch_retry_poll_interval,
            ),
            reads_states=not params.pages_alone,
            events=tree.events,
        )
        is_buffer = server_args.hicache_host_memory_mode == "buffer_only"
        pools = {name: one.host_pool for name, one in controller.mem_pool_host.entries.items()}
        tree.add_host(self.host_pool, pools, is_buffer=is_buffer)
        if not is_buffer:
            tree.host.evicted = metrics.evicted.labels("host")
        self.storage_prefetch = StoragePrefetch(tree, store, metrics)
        self.storage_backup = StorageBackup(tree, store, metrics)
        writes, policy = self.storage_backup, server_args.hicache_write_policy
        make_backup: Callable[..., HostBackup] = (
            partial(BufferedBackup, storage=writes)
            if is_buffer
            else partial(HostBackup, on_landed=writes.on_host_landed)
        )
        self.host_backup = make_backup(tree, controller, write_policy=policy, metrics=metrics)
        self.administration = StorageAdministration(
            store, self.host_backup, self.is_busy, self._group
        )
        self.eviction = EvictionToHost(tree, controller, self.host_backup, metrics)
        evict_from = self.eviction.evict
        self.host_load = HostLoad(
            tree,
            controller,
            evict_from=evict_from,
            reduce_min=self._all_reduce_attn_groups,
            metrics=metrics,
        )
        super().__init__(params, tree, evict_from, metrics)
        self.request_reads = RequestReads(
            tree, store, self.storage_prefetch, self.match_prefix, self.init_load_back
        )
        if is_buffer:
            self._on_tick.append(self.request_reads.begin_tick)
        metrics.host_total.set(self.host_pool.size)
        counts = {"epoch of L3": lambda: store.epoch}
        for tier in tree.tiers:
            counts[f"free slots of {tier.name}"] = tier.pool.available_size
        self._replicated = CacheState(lambda: tree.root, counts)
        reduce_min = self._all_reduce_attn_groups
        self._sync = TickSync(self._group, self._replicated, reduce_min, metrics.rank_lag)
        if backend is not None:
            try:
                on_all_ranks(self._group, lambda: store.attach(backend, extra_config))
            except BaseException:
                self.shutdown()
                raise

    # ---- start and end ---------------------------------------------------------------------

    def reset(self) -> None:
        """Empty L1 and L2. Raises AssertionError while any operation is under way."""
        assert not self.is_busy(), f"cannot reset while busy: {self.is_busy()}"
        super().reset()
        self.request_reads.clear()
        self.cache_controller.reset()

    def shutdown(self) -> None:
        self.administration.give_up("the server is shutting down")
        self.store.shutdown()
        self.cache_controller.shutdown()
        self._destroy_prefetch_sync_groups()

    def is_busy(self) -> dict[str, int]:
        writes = self.storage_backup
        counts = {
            "administration": int(self.store.is_changing),
            "prefetches": len(self.storage_prefetch.table.operations),
            # A copy keeps its place in the queue even if an eviction has settled its pages.
            "writes": len(self.host_backup.writing) or len(self.cache_controller.ack_write_queue),
            "loads": len(self.host_load.loading),
            "checks": int(writes.check is not None),
            "backups": len(writes.under_way) + len(writes.postponed),
        }
        if self.tree.host_is_buffer:  # Else they wait for the end of others.
            counts["backups"] += len(self.host_backup.owed.nodes)
        return {kind: count for kind, count in counts.items() if count}

    # ---- one tick --------------------------------------------------------------------------

    @property
    def needs_tick(self) -> bool:
        needs = self.store.silence_ms or not self.store.answers or self.is_busy()
        return bool(needs or (self.tree.host_is_buffer and self.tree.host.unneeded()))

    def watch_queues(self, queues: ReplicatedState) -> None:
        self._replicated.queues = queues

    def watch_store(self) -> None:
        self.store.usage()

    def check_hicache_events(self) -> None:
        self.storage_prefetch.begin_tick()
        controller = self.cache_controller
        if self.tree.host_is_buffer:
            self._pass_on()
        controller.start_writing(soon=True)
        busy = self.is_busy()
        if not (busy or self.store.silence_ms) and self.store.answers:
            return
        is_writing = "backups" in busy or "checks" in busy
        # Copies end in the order of their queues. A write may have pages that were computed from a
        # load: what that has brought is checked first.
        num_settled = controller.num_settled_loads
        writes, loads = (
            sum(1 for _ in itertools.takewhile(has_ended, acks))
            for acks, has_ended in (
                (
                    controller.ack_write_queue,
                    lambda ack: ack.num_loads <= num_settled and ack.finish_event.query(),
                ),
                (controller.ack_load_queue, lambda ack: ack.finish_event.query()),
            )
        )
        progress = Progress(writes=writes, loads=loads)
        self.store.report(progress)
        if "administration" in busy:
            self.administration.report(progress)
        if "prefetches" in busy:
            self.storage_prefetch.report(progress)
        if is_writing:
            self.storage_backup.report(progress)
        agreed = self._sync.agree(progress)
        self.store.act_on(agreed)
        if "administration" in busy:
            self.administration.act_on(agreed)
        if "prefetches" in busy:
            self.storage_prefetch.act_on(agreed)
        if agreed.writes:
            self.host_backup.settle(agreed.writes)
        if agreed.loads:
            self.host_load.settle(agreed.loads)
        if is_writing:
            self.storage_backup.act_on(agreed)
        if self.tree.host_is_buffer:
            self._pass_on()
        elif agreed.may_free_host:
            self.request_reads.is_full = False
            if self.host_backup.owed.nodes:
                self.host_backup.resume()

    def _pass_on(self) -> None:
        """Free a buffer's pages that need not stay, and begin copies that wait for their room."""
        self.tree.host.release_unneeded()
        self.host_backup.resume()

    def _create_prefetch_sync_groups(self) -> None:
        """Make the groups in which the ranks agree on copies and transfers: a group of the ranks
        with the same heads, and one of the ranks that split the heads; no group of a single rank. A
        collective, called once, after all ranks have made their controllers."""
        self._prefetch_sync = self._group.open_min()

    def _all_reduce_prefetch_groups(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise MIN over the ranks with equal trees: first over attention CP, then over
        attention TP. Returns a new tensor. A collective; threads of copies and of L3 make none."""
        return self._prefetch_sync.reduce_min(values)

    _all_reduce_attn_groups = _all_reduce_prefetch_groups
    """The name by which upstream's tree asks for the MIN, where the other is the controller's."""

    def _destroy_prefetch_sync_groups(self) -> None:
        """End the groups. Idempotent."""
        self._prefetch_sync.close()

    def start_writing_host_cache(self) -> None:
        """Start the queued copies to the host now, in order after all launched work; otherwise the
        next tick starts them."""
        self.cache_controller.start_writing()

    # ---- L2 --------------------------------------------------------------------------------

    def _on_insert(self, path: list[TreeNode]) -> None:
        if any(read.needs for read in self.storage_prefetch.table.operations):
            self.storage_prefetch.note_used(path)
        self.host_backup.on_insert(path)
        if self.store.attached is not None:
            self.storage_backup.on_insert(path)

    def write_backup(self, node: TreeNode) -> bool:
        """Queue the copy of a node to the host; False if L2 has no room for it."""
        return self.host_backup.write(node)

    def evict_host(self, num_tokens: int) -> int:
        """Free unpinned host pages of at least `num_tokens` tokens, or all of them if there are
        fewer; return the freed tokens."""
        return self.tree.host.evict(num_tokens)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        chain: list[TreeNode] = []
        above = params.best_match_node
        while above.value is None and above.parent is not None:
            chain.append(above)
            above = above.parent
        chain.reverse()
        tokens, quota = tokens_of(chain), params.mem_quota
        needs_state = params.needs_state
        while chain and not (
            (quota is None or tokens <= quota) and (not needs_state or self.tree.can_end(chain[-1]))
        ):
            tokens -= len(chain.pop().key)
            params.refusal = NoLoad.BUDGET
        loaded = self.host_load.load(chain, above, params)
        if isinstance(loaded, torch.Tensor):
            return loaded, chain[-1] if chain else above
        params.refusal = loaded or params.refusal
        while (
            needs_state
            and above.parent is not None
            and any(state.value is None for state in above.states)
        ):
            above = above.parent  # No prefix may end here now.
        return self.tree.values_of([]), above

    def ready_to_load_host_cache(self) -> int:
        return self.cache_controller.start_loading()

    def verify_load(self, index: int) -> None:
        self.host_load.settle_until(index + 1)

    @property
    def newest_load(self) -> int:
        """Index of the load that was issued last; -1: there was none."""
        return self.cache_controller.num_loads - 1

    def has_settled(self, load: int) -> bool:
        """True if load `load` and all before it have ended on all ranks, and pages of them that
        differ from their checksums are condemned."""
        return load < self.cache_controller.num_settled_loads

    # ---- L3 --------------------------------------------------------------------------------

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
        report: CacheReport | None = None,
    ) -> None:
        self.request_reads.arrive(
            req_id,
            last_host_node,
            new_input_tokens,
            last_hash,
            prefix_keys,
            extra_key=extra_key,
            only_join=only_join,
            report=report,
        )

    def check_prefetch_progress(self, req_id: str) -> bool:
        return self.request_reads.may_schedule(req_id)

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return self.request_reads.take_tokens(req_id)

    def note_scheduled(self, rid: str) -> None:
        super().note_scheduled(rid)
        self.request_reads.release(rid)

    def release_aborted_request(self, rid: str) -> None:
        super().release_aborted_request(rid)
        self.request_reads.release(rid)
        self.request_reads.take_tokens(rid)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a prefill of `tokens` took `seconds`, which is the cost of missing pages."""
        if self.store.attached is not None:
            self.store.attached.prefill_rate.add(tokens, seconds)

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        self.storage_prefetch.cost_model.workload = workload

    def write_backup_storage(self, node: TreeNode) -> str | None:
        """Queue the write of a node's host pages to L3; return None, or the reason why not."""
        return self.storage_backup.write(node)

    # ---- administration --------------------------------------------------------------------

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> ChangeResult:
        """Attach L3, or change the policies of the attached one, and wait for the end.

        `served_model_name` must be None: objects in L3 are named after the model that the server
        was started with.

        Returns whether the change was made, and the work done or the reason why not; the result
        unpacks to these two.
        """
        if served_model_name is not None:
            return ChangeResult(
                False, "served_model_name is that of the server's start: leave it out"
            )
        return self._change_storage(
            lambda: self.administration.begin_attaching(
                storage_backend,
                storage_backend_extra_config_json,
                hicache_storage_prefetch_policy,
                hicache_write_policy,
            )
        )

    def detach_storage_backend(self) -> ChangeResult:
        """Detach L3, and wait for the end; its objects and the policies stay. Idempotent."""
        return self._change_storage(self.administration.begin_detaching)

    def clear_storage_backend(self) -> ChangeResult:
        """Remove this namespace's objects from L3, and wait for the end."""
        return self._change_storage(self.administration.begin_clearing)

    def _change_storage(self, begin: Callable[[], None]) -> ChangeResult:
        try:
            begin()
        except ValueError as error:
            return ChangeResult(False, str(error))
        return self.administration.wait(self.check_hicache_events)

    def storage_state(self) -> dict[str, Any]:
        """Answer to `GET /hicache/storage-backend`: backend, its configuration without secrets, its
        transport, policies."""
        return {**self.store.state(), "hicache_write_policy": self.host_backup.write_policy}

    @property
    def storage_backend_name(self) -> str | None:
        """Class name of the L3 backend, as `cached_tokens_details` shows it; None without one."""
        return None if self.store.attached is None else self.store.attached.backend_name

    def tiers(self) -> list[str]:
        """One line per tier below L1: its size, and the reason for the size."""
        states = "".join(f" and {one.host.pool.size} states" for one in self.tree.components)
        group = self.cache_controller.mem_pool_host
        extra = [one.name for one in self._get_extra_pools()]
        pools = ", ".join([group.primary_entry.name, *extra])
        host = (
            f"L2: {self.host_pool.size} tokens{states}, {group.nbytes / 1e9:.2f} GB of host memory "
            f"for {pools} in layout {self.host_pool.layout}, I/O {self.cache_controller.io_backend}"
            f"; reads from L3 hold at most {self.storage_prefetch.share} tokens"
        )
        return [host, self.store.describe()]

    def _get_extra_pools(self) -> list[PoolTransfer]:
        """The auxiliary pools, whose state moves with its pages: for each one a transfer
        without slots, with what a hit needs of it."""
        return self.cache_controller.mem_pool_host.extra_queries

    # ---- self check and metrics ------------------------------------------------------------

    def count_lookup(self, lookup: Lookup) -> None:
        super().count_lookup(lookup)
        found = {"device": lookup.device, "host": lookup.host}
        if self.storage_backend_name is not None:
            found["storage"] = lookup.storage
        missing = lookup.prompt_tokens
        for tier, tokens in found.items():
            missing -= tokens
            self.metrics.hits.labels(tier).inc(tokens)
            self.metrics.misses.labels(tier).inc(missing)

    def host_use(self) -> HostUse:
        """The use of the pages of L2."""
        pages = self.tree.host
        owned = [slots for tier, _, slots in self._owned_by_operations() if tier is pages]
        pinned = [(load.node, load.length) for load in self.host_load.loading.values()]
        pinned += [(op.node, len(op.host_indices)) for op in self.storage_backup.under_way]
        return host_use(pages, owned, pinned)

    def read_metrics(self) -> None:
        super().read_metrics()
        self.store.read_metrics()
        self.metrics.host_evictable.set(self.host_use().evictable)
        for component in self.tree.components:
            states = component.host.pool
            component.metrics.set_host(total=states.size, free=states.available_size())
        used = self.host_pool.size - self.host_pool.available_size()
        self.metrics.host_used.set(used)
        self.metrics.host_stuck.set(self.storage_prefetch.table.stuck_tokens())
        under_way = self.is_busy()
        for queue in QUEUES:
            self.metrics.queue_length.labels(queue).set(under_way.get(queue, 0))

    def integrity_parts(
        self,
        request_slots: Iterable[torch.Tensor] = (),
        request_states: Iterable[torch.Tensor] = (),
    ) -> Parts:
        yield from super().integrity_parts(request_slots, request_states)
        self.storage_prefetch.table.check()
        self.host_backup.owed.check()
        yield from self.cache_controller.mem_pool_host.integrity_parts()

    def _owned_by_operations(self) -> Iterable[tuple[PoolTier, str, torch.Tensor]]:
        return [*self.storage_prefetch.owned_slots(), *self.host_backup.owned_slots()]

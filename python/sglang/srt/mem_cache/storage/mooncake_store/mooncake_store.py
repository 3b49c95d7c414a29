"""L3 in a Mooncake Store: pages move between registered host memory and the store without copies.

Threads: one get (prefetch thread) and one set (backup thread) at a time; `exists`, `probe` and
`get_stats` in any thread. A helper thread hashes a batch while the next one is on the wire.
Mooncake's calls can block for up to a minute. This module does not bound that; its callers do.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import chain, compress, islice
from typing import Any, Final

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.host.host_memory import MooncakeHostTensorAllocator
from sglang.srt.mem_cache.storage.base import combine_hits, leading_run
from sglang.srt.mem_cache.storage.counters import StorageCounters
from sglang.srt.mem_cache.storage.mooncake_store.base_store import MooncakeBaseStore
from sglang.srt.mem_cache.storage.mooncake_store.client import (
    NO_ROOM,
    STORE_FAILURES,
    UNKNOWN_TENANT,
    UNREGISTERED,
    MooncakeClient,
    get_outcome,
    set_outcome,
)
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig, is_reachable
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PageBatch, PoolRows
from sglang.srt.mem_cache.storage.plain_pool import as_storage_pool
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PlainHostPool,
    PoolTransferResult,
    StoragePool,
    StorageUnavailable,
)
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.srt.utils.threads import leave_cores_to_model, started_pool

logger = logging.getLogger(__name__)
_CONCURRENT_GETS: Final = 4
"""Gets under way from a stand-alone client, which serves them in parallel with `--threads=4`."""
_OTHERS_S: Final = 0.25
"""Seconds that another client's put of the same object has to end."""
_ONE_RANK: Final = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=True,
    model_name=None,
)

__all__ = [
    "MooncakeBaseStore",
    "MooncakeHostTensorAllocator",
    "MooncakeStore",
    "MooncakeStoreConfig",
]


class MooncakeStore(MooncakeBaseStore):
    """Page objects in a Mooncake Store; `HiCacheStorage` documents the calls.

    Args:
        storage_config: Ranks, namespace and extra config (the settings of `MooncakeStoreConfig`);
            None: one rank, no namespace, settings from file and environment.
        mem_pool: The primary pool, if it already exists.
    """

    renews_prefixes = True

    def __init__(
        self,
        storage_config: HiCacheStorageConfig | None = None,
        mem_pool: PlainHostPool | None = None,
    ) -> None:
        self.storage_config: HiCacheStorageConfig = storage_config or _ONE_RANK
        self._verify = self.storage_config.verify_checksum
        extra_config = self.storage_config.extra_config
        settings = MooncakeStoreConfig.load_from_extra_config(extra_config)
        super().__init__(settings, self.storage_config.tp_rank)
        self._rows: dict[str, PoolRows] = {}
        self._counters = StorageCounters()
        self._warn = RateLimitedLogger(logger)
        self._hasher = started_pool(2, "l3-hash", leave_cores_to_model)
        self._readers = (
            started_pool(_CONCURRENT_GETS, "l3-read", leave_cores_to_model)
            if self.config.standalone_storage
            else None
        )
        """Several readers, because a stand-alone client uses one thread for each call."""
        self._has_failed_transfer = False
        """True if a whole transfer failed since the last good probe: the client may be broken."""
        self._batches_of_get = 2 if self._readers is None else _CONCURRENT_GETS + 1
        """Batches of a get under way: on the wire, one of them being verified."""
        self._direction_locks = {True: threading.Lock(), False: threading.Lock()}
        if mem_pool is not None:
            self.register_mem_pool_host(mem_pool)

    # -- pools -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: PlainHostPool) -> None:
        pool = as_storage_pool(mem_pool_host, self.mem_pool_host)
        self._register(PoolName.KV, pool)
        super().register_mem_pool_host(pool)

    def register_mem_host_pool_v2(self, host_pool: PlainHostPool, host_pool_name: str) -> None:
        if host_pool_name != PoolName.KV:
            host_pool = as_storage_pool(host_pool, (self.extra_mem_pools or {}).get(host_pool_name))
            self._register(host_pool_name, host_pool)
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def _makes_groups(self) -> bool:
        """True if the objects of a page are put as a group, since it may have several."""
        is_alone = self.storage_config.object_key("", PoolName.KV) == f"/{PoolName.KV}"
        return self.config.enable_group_semantics and (len(self._rows) > 1 or not is_alone)

    def _register(self, name: str, pool: StoragePool) -> None:
        known = self._rows.get(name)
        if known is not None and known.pool is pool:
            return
        shared = MooncakeHostTensorAllocator() if self.config.standalone_storage else None
        rows = PoolRows(
            pool,
            key_suffix=self.storage_config.object_key("", name),
            with_checksum=self._verify,
            allocator=shared,
            batches_of_get=self._batches_of_get,
            others=self._rows.values(),
        )
        for tensor in rows.buffers():
            self.register_buffer(tensor)
        self._rows[name] = rows
        if known is not None:
            in_use = {tensor.data_ptr() for one in self._rows.values() for tensor in one.buffers()}
            for tensor in known.buffers():
                if tensor.data_ptr() not in in_use:
                    self._client.unregister(tensor)

    # -- v2 ----------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self.prompts_exist([keys], [extra_info], pool_transfers)[0]

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        if pool_transfers:
            return self._prompts_in_all_pools(prompts, pool_transfers)
        # One call costs as much as 500 more keys in a call.
        there = iter(self._exist(self.object_keys(list(chain(*prompts)), PoolName.KV)))
        return [PoolTransferResult(leading_run(list(islice(there, len(p))))) for p in prompts]

    def _prompts_in_all_pools(
        self, prompts: Sequence[list[str]], pool_transfers: Sequence[PoolTransfer]
    ) -> list[PoolTransferResult]:
        """`prompts_exist` with several pools, in one call as well."""
        asked = self._get_hybrid_page_component_keys(
            list(dict.fromkeys(chain(*prompts))), pool_transfers
        )
        there = set(compress(asked, self._exist(asked)))

        def exists(pool: str, keys: Sequence[str]) -> list[bool]:
            return [key in there for key in self.object_keys(keys, pool)]

        return [combine_hits(keys, pool_transfers, exists, PoolName.KV) for keys in prompts]

    def _get_hybrid_page_component_keys(
        self, pages: Sequence[str], pool_transfers: Sequence[PoolTransfer]
    ) -> list[str]:
        """Keys of all parts of pages: first the primary pool's, then those of the other pools."""
        pools = [PoolName.KV, *(transfer.name for transfer in pool_transfers)]
        return [key for pool in pools for key in self.object_keys(pages, pool)]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        return self._move(transfers, is_get=True)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        before = extra_info.prefix_keys if extra_info is not None else None
        return self._move(transfers, is_get=False, before=before or ())

    # -- v1: full object keys; the engine does not use it ------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        move = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
        return list(map(bool, self._move([move], is_get=True, are_full=True)[PoolName.KV]))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        move = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
        return list(map(bool, self._move([move], is_get=False, are_full=True)[PoolName.KV]))

    # -- pages to batches --------------------------------------------------------------------------

    def _move(
        self,
        transfers: list[PoolTransfer],
        *,
        is_get: bool,
        are_full: bool = False,
        before: Sequence[str] = (),
    ) -> dict[str, list[CacheOutcome]]:
        """Move pages, pool by pool; one get and one set at a time. Returns only when no transfer
        uses host pages.

        Args:
            are_full: The keys name objects, not pages.
            before: Keys of the pages before those of a set.
        """
        moved: dict[str, list[CacheOutcome]] = {}
        names: dict[str, list[str]] = {}
        put: list[str] = []
        with self._direction_locks[is_get]:
            client = self._client
            try:
                for transfer in transfers:
                    _, keys, indices = self.checked(transfer)
                    names[transfer.name] = object_keys = (
                        keys if are_full else self.object_keys(keys, transfer.name)
                    )
                    is_prefix = transfer.hit_policy is PoolHitPolicy.ALL_PAGES
                    rows = self._rows[transfer.name]
                    if is_get:
                        outcomes = self._get_batches(rows, object_keys, indices, is_prefix)
                    else:
                        outcomes = self._set_batches(rows, object_keys, indices, is_prefix, put)
                    moved[transfer.name] = outcomes
                lost = self._not_stored(put, before)
            finally:
                if client.has_unfinished_transfers:
                    client.wait_for_unfinished_transfers()
        for transfer in transfers:
            outcomes, keys = moved[transfer.name], names[transfer.name]
            for index, key in enumerate(keys if lost else ()):
                if key in lost:
                    outcomes[index] = CacheOutcome.MISS
            outcomes += [CacheOutcome.SHORT] * (len(keys) - len(outcomes))
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES and not all(outcomes):
                # A landed page is useless if an earlier page did not land.
                rest = leading_run(outcomes)
                outcomes[rest:] = [CacheOutcome.SHORT if one else one for one in outcomes[rest:]]
            page_bytes = self.pool(transfer.name).page_bytes
            self._counters.add("get" if is_get else "set", outcomes, page_bytes)
        return moved

    def _get_batches(
        self, rows: PoolRows, keys: list[str], slots: torch.Tensor, is_prefix: bool
    ) -> list[CacheOutcome]:
        """Get one batch after another; verify one while later ones are on the wire."""
        outcomes: list[CacheOutcome] = []
        under_way: deque[Future[list[CacheOutcome]]] = deque()
        try:
            for index, piece in enumerate(rows.cut(keys, slots)):
                if self._readers is None:
                    # Get in this thread and verify in the helper.
                    batch = rows.lay_out(index, *piece, is_get=True)
                    codes = self._transfer(self._client, batch, is_get=True)
                    future = self._hasher.submit(self._check, rows, batch, codes)
                else:
                    future = self._readers.submit(self._read, rows, index, *piece)
                under_way.append(future)
                if len(under_way) == self._batches_of_get:
                    outcomes += under_way.popleft().result()
                    if is_prefix and not all(outcomes):
                        break
        finally:
            # Also after a failure, because the other batches still write into host pages.
            wait(under_way)
        for future in under_way:
            outcomes += future.result()
        return outcomes

    def _read(
        self, rows: PoolRows, index: int, keys: list[str], slots: torch.Tensor
    ) -> list[CacheOutcome]:
        """Get and verify a batch, in a reader."""
        batch = rows.lay_out(index, keys, slots, is_get=True)
        return self._check(rows, batch, self._transfer(self._client, batch, is_get=True))

    def _check(self, rows: PoolRows, batch: PageBatch, codes: list[int]) -> list[CacheOutcome]:
        """Check the pages of a batch, deliver the good ones, and remove damaged objects."""
        outcomes = [
            get_outcome(code, sum(sizes)) for code, sizes in zip(codes, batch.sizes, strict=True)
        ]
        rows.deliver(batch, outcomes)
        damaged = list(compress(batch.keys, [one is CacheOutcome.DAMAGED for one in outcomes]))
        if damaged:
            for key in damaged:
                self._warn.warning("damaged", "L3 object is damaged: %s", key)
            self._client.remove(damaged)
        return outcomes

    def _not_stored(self, put: list[str], before: Sequence[str]) -> set[str]:
        """The objects of `put` that the store does not have, though it accepted their puts.

        Mooncake accepts a put and stores nothing while another client's put of the key is pending.
        That one gets a moment to end: nobody else may write the pages behind it. The query also
        gives leases to the new objects and to the pages before them: a full store evicts the object
        first whose lease ended first, and engines do not query pages that they have in L1 or L2.
        Else a prefix could lose its first pages long before later ones. The order of the keys has
        no effect: the master walks through its shards.

        Args:
            before: Keys of pages. One object of each is queried if its others are of its group.
        """
        if not put:
            return set()
        pools = [PoolName.KV] if self.config.enable_group_semantics else self._rows
        there = self._exist([*put, *chain(*(self.object_keys(before, pool) for pool in pools))])
        lost = set(compress(put, [not one for one in there]))
        if lost:
            time.sleep(_OTHERS_S)
            lost -= set(compress(pending := list(lost), self._exist(pending)))
        if lost:
            self._counters.bump("set_unfinished_pages", len(lost))
            self._warn.warning(
                "unfinished", "Mooncake took %d objects of %d, but does not have them: another "
                "client writes them, or died while it did (the master's "
                "--put_start_discard_timeout_sec); they are written when they are used again",
                len(lost), len(put),
            )  # fmt: skip
        return lost

    def _set_batches(
        self,
        rows: PoolRows,
        keys: list[str],
        slots: torch.Tensor,
        is_prefix: bool,
        put: list[str],
    ) -> list[CacheOutcome]:
        """Put absent pages, one batch after another; seal the next while one is on the wire.

        `put` gets the objects that were put, as Mooncake says.
        """
        client = self._client
        outcomes = [
            CacheOutcome.LANDED if there else CacheOutcome.SHORT for there in self._exist(keys)
        ]
        absent = [index for index, there in enumerate(outcomes) if not there]
        if len(absent) < len(keys):
            self._counters.bump("set_present_pages", len(keys) - len(absent))
        if not absent:
            return outcomes
        chosen = slots.view(len(keys), -1)[torch.tensor(absent)].reshape(-1)
        written: list[CacheOutcome] = []
        suffix = rows.key_suffix if self._makes_groups else ""
        pieces = rows.cut([keys[index] for index in absent], chosen)
        batch = rows.lay_out(0, *pieces[0], is_get=False)
        for index, following in enumerate([*pieces[1:], None], 1):
            sealing: list[Future[PageBatch]] = []
            if following is not None:
                sealing = [self._hasher.submit(rows.lay_out, index, *following, is_get=False)]
            try:
                codes = self._transfer(client, batch, is_get=False, group_suffix=suffix)
            finally:
                # Also after a failure, because the next put seals into the same rows.
                wait(sealing)
            written += [set_outcome(code) for code in codes]
            if is_prefix and not all(written):
                break
            if sealing:
                batch = sealing[0].result()
        for index, outcome in zip(absent, written, strict=False):
            outcomes[index] = outcome
            if outcome:
                put.append(keys[index])
        return outcomes

    # -- calls into Mooncake -----------------------------------------------------------------------

    def _transfer(
        self, client: MooncakeClient, batch: PageBatch, *, is_get: bool, group_suffix: str = ""
    ) -> list[int]:
        """Make one multi-buffer call. Returns a code for each page.

        Args:
            group_suffix: For a put, the end of the keys of all objects, without which they are the
                names of their groups; empty: they have no groups.

        Raises StorageUnavailable if no page was moved because the store does not work.
        """
        groups = [key.removesuffix(group_suffix) for key in batch.keys] if group_suffix else None
        codes = client.move(batch, is_get=is_get, groups=groups)
        if no_room := codes.count(NO_ROOM):
            self._counters.bump("set_no_room_pages", no_room)
            self._warn.warning(
                "full", "Mooncake Store is full: no room for %d pages of %d; give it more store "
                "nodes, or lower the master's --eviction_high_watermark_ratio",
                no_room, len(codes),
            )  # fmt: skip
        if UNKNOWN_TENANT in codes:
            self._warn.warning("tenant", UNREGISTERED, self.config.tenant_id)
        if codes and all(code in STORE_FAILURES for code in codes):
            self._has_failed_transfer = True
            way = "get" if is_get else "put"
            raise StorageUnavailable(f"Mooncake failed a {way} of {len(codes)} pages: {codes[0]}")
        return codes

    # -- life --------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Put and get one small object. Raises StorageUnavailable if that fails."""
        if not self._moves_bytes():
            raise StorageUnavailable("Mooncake does not store: no store node has room or answers")

    def probe(self) -> bool:
        """True if the store works; replaces the client if needed.

        A full store works, because it can be read.

        Never raises. Takes at most a few seconds if the master is gone; a call to a hanging store
        node may take a minute.
        """
        if not is_reachable(self.config):
            return False
        try:
            if not self._client.is_given_up and self._moves_bytes(
                full_is_fine=not self._has_failed_transfer
            ):
                self._has_failed_transfer = False
                return True
            self.rebuild()
            self._has_failed_transfer = False
            self._counters.bump("rebuilds")
            return self._moves_bytes()
        except StorageUnavailable as error:
            self._warn.warning("rebuild", "Mooncake still fails: %s", error)
            return False

    def _moves_bytes(self, *, full_is_fine: bool = True) -> bool:
        key = f"{self.storage_config.namespace}/probe-{os.getpid()}-{id(self._client):x}"
        return self._client.moves_bytes(key, full_is_fine=full_is_fine)

    def clear(self) -> None:
        """Remove this namespace's objects. Raises ValueError without one, or StorageUnavailable."""
        namespace = self.storage_config.namespace
        if not namespace:
            raise ValueError("clear: the storage config has no namespace to clear")
        with self._client.using() as store:
            start = re.escape(self._key_prefix + namespace)
            removed: int = store.remove_by_regex(f"^{start}/", True)
        if removed < 0:
            raise StorageUnavailable(f"Mooncake could not remove objects (code {removed})")
        logger.info("Mooncake store: removed %d objects", removed)

    def close(self) -> None:
        for helpers in (self._hasher, self._readers):
            if helpers is not None:
                helpers.shutdown(wait=True)
        super().close()

    def get_stats(self) -> dict[str, Any]:
        budget = self._client.budget
        return self._counters.snapshot() | {
            "slices_in_flight": budget.in_flight,
            "slices_peak": budget.peak,
            "protocol": self.protocol,
        }

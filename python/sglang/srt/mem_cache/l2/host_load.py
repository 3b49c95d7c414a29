"""Loads from L2 to L1, with the comparison of what has arrived.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.l2.host_backup import DeviceCopy
from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.tenants import Evictor
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of, tokens_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheAck, HiCacheController
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import DeviceTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.state_component import StateComponent

logger = logging.getLogger(__name__)


class NoLoad(StrEnum):
    """Reason why pages that L2 has are not loaded."""

    BUDGET = "load_budget"
    """The device slots that other requests leave are too few."""
    NO_DEVICE_MEMORY = "no_device_memory"
    """L1 is full of pages or states in use."""
    NO_STATE_MEMORY = "no_state_memory"
    """No slot for the recurrent state at their end may be taken."""


class HostLoad:
    """Loads of one tree.

    While a load runs, its device pages are locked and its host pages are pinned. States at the end
    of the prefix are loaded with the pages, or alone if they are on the device.

    Args:
        evict_from: Frees slots of a pool in L1: at least so many if possible, and returns how many.
        reduce_min: Element-wise MIN over the ranks.

    Attributes:
        loading: The loads under way, by operation. Read only.
    """

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        *,
        evict_from: Callable[[DeviceTier, int], int],
        reduce_min: Callable[[torch.Tensor], torch.Tensor],
        metrics: HiCacheMetrics,
    ) -> None:
        self.loading: dict[int, DeviceCopy] = {}
        self._tree = tree
        self._controller = controller
        self._evict_from = evict_from
        self._reduce_min = reduce_min
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)

    def load(
        self,
        chain: list[TreeNode],
        above: TreeNode,
        params: InitLoadBackParams,
    ) -> torch.Tensor | NoLoad | None:
        """Queue a load of pages, of the states at their end, or both; return its device slots,
        empty if only states are loaded, or why there is no room. None: nothing is missing.

        Args:
            chain: The nodes whose pages are loaded, from the top; may be empty.
            above: The last node on the device before `chain`.
            params: What the request needs; the match and `mem_quota` are not read.
        """
        pinned = chain or [above]
        last = pinned[-1]
        missing = {
            component: slot
            for component in self._tree.components
            if params.needs_state
            and component.of(last).value is None
            and (slot := component.of(last).host_value) is not None
        }
        if not (chain or missing):
            return None
        if missing and params.mamba_quota == 0:
            return NoLoad.NO_STATE_MEMORY
        for node in pinned:
            self._tree.host.pin(node)
        tokens = tokens_of(chain)
        reserved = self._reserve(tokens, above, missing, params)
        if reserved is None:
            for node in pinned:
                self._tree.host.unpin(node)
            return NoLoad.NO_DEVICE_MEMORY
        slots, states = reserved
        values = [node.host_value for node in chain if node.host_value is not None]
        host_indices = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
        extra = [component.transfer(slot, states[component]) for component, slot in missing.items()]
        operation = self._controller.load(host_indices, slots, extra)
        done = 0
        for node in chain:
            end = done + len(node.key.ids)
            own = slots[done:end]
            # A view keeps all slots alive, and a copy is a launch before the load sets out.
            self._tree.device.put(node, own if 2 * (end - done) >= tokens else own.clone())
            done = end
        self._tree.lock(last)
        for component, slot in states.items():
            component.device.put(last, slot)
            component.device.lock(last)
        length = tokens_of(pinned)
        number, report = operation.operation_id, params.report
        self.loading[number] = DeviceCopy(number, last, length, host_indices, missing, report)
        self._metrics.load_back.inc(done)
        return slots

    def _reserve(
        self,
        tokens: int,
        above: TreeNode,
        missing: Collection[StateComponent],
        params: InitLoadBackParams,
    ) -> tuple[torch.Tensor, dict[StateComponent, torch.Tensor]] | None:
        """Allocate device slots for pages, and for the states of `missing`; None: no room for all
        of them."""
        # The eviction must not take the nodes to load or their ancestors.
        self._tree.lock(above)
        states = {}
        for component in missing:
            if (slot := self._alloc_state(component)) is not None:
                states[component] = slot
        # The tokens after the load too: a second eviction would delay the first token.
        short = tokens + params.rest - self._tree.allocator.available_size()
        if short > 0:
            req, device, why = params.req, self._tree.device, "room to load from L2"
            by = None if req is None else Evictor(req.rid, req.extra_key)
            self._tree.tenants.evict(
                device, Decision.EVICTED_DEVICE, why, by, lambda: self._evict_from(device, short)
            )
        slots = self._tree.allocator.alloc(tokens) if len(states) == len(missing) else None
        self._tree.unlock(above)
        if slots is not None:
            return slots, states
        for component, slot in states.items():
            component.device.free(slot)
        self._log.info("l1-full", "no room in L1 to load %d tokens back from L2", tokens)
        return None

    def _alloc_state(self, component: StateComponent) -> torch.Tensor | None:
        """A free device slot for a state, int64 `[1]` on the CPU; evicts for it."""
        if not component.pool.available_size():
            self._evict_from(component.device, 1)
        taken = component.pool.take(1)
        return None if taken is None else torch.tensor(taken)

    def is_filling(self, path: Sequence[TreeNode]) -> bool:
        """True if pages of some node of `path` are being loaded."""
        return any(
            node in path
            for copy in self.loading.values()
            for node, _, _ in parts_of(copy.node, copy.length)
        )

    def settle(self, num_ended: int) -> None:
        """Act on the end of the first `num_ended` loads, on which the ranks have agreed. A
        collective.

        Pages that differ from their checksums on any rank are condemned, with all that may have
        been computed from them; see `PrefixTree.condemn`.
        """
        copies: list[DeviceCopy] = []
        intact: list[int] = []
        for _ in range(num_ended):
            ack = self._controller.ack_load_queue.popleft()
            now = time.monotonic()
            self._metrics.load_back_seconds.observe(now - ack.started)
            damaged = self._damaged_pages(ack)
            for operation_id in ack.operation_ids:
                copy = self.loading.pop(operation_id)
                if copy.report is not None:
                    copy.report.add_span("load", ack.started, now, copy.length)
                copies.append(copy)
                intact.append(self._intact_tokens(copy, damaged))
        agreed = self._reduce_min(torch.tensor(intact)).tolist() if copies else []
        for copy, tokens in zip(copies, agreed, strict=True):
            if tokens < copy.length:
                self._condemn(copy, tokens)
            self._settle(copy)

    def settle_until(self, num_loads: int) -> None:
        """Wait until the first `num_loads` loads since the start have ended, and act on their end.
        A collective if one of them is under way."""
        controller = self._controller
        missing = num_loads - controller.num_settled_loads
        if missing > 0:
            controller.ack_load_queue[missing - 1].finish_event.synchronize()
            self.settle(missing)

    def _damaged_pages(self, ack: HiCacheAck) -> dict[str, npt.NDArray[np.int64]]:
        """Host pages of a load, by pool, that have arrived with other bytes than they should."""
        found = {}
        for one in ack.digests:
            checksums = self._controller.mem_pool_host.get_pool(one.pool).checksums
            digests, known, damaged = one.rows(), 0, one.pages[:0]
            if digests is not None:
                known = int(checksums.have(one.pages).sum())
                damaged = one.pages[checksums.differ(one.pages, digests)]
            count = self._metrics.checked_pages.labels
            count("host", "unchecked").inc(len(one.pages) - known)
            count("host", "intact").inc(known - len(damaged))
            count("host", "damaged").inc(len(damaged))
            if len(damaged):
                logger.error(
                    "L2: %d of %d pages of pool %s differ from their checksums, the first is host "
                    "page %d. They are dropped and computed again; if it recurs, test this "
                    "machine's memory",
                    len(damaged), len(one.pages), one.pool, damaged[0],
                )  # fmt: skip
                found[one.pool] = damaged
        return found

    def _intact_tokens(self, copy: DeviceCopy, damaged: dict[str, npt.NDArray[np.int64]]) -> int:
        """How many tokens of a load come before its first damaged page; a state counts as the last
        page."""
        intact, page_size = copy.length, self._tree.page_size
        for pool, pages in damaged.items():
            entry = self._controller.mem_pool_host.entries[pool]
            owner = entry.spec.indices_from_pool or pool
            states = copy.host_states.items()
            state = next((slot for c, slot in states if c.pool.spec.name == owner), None)
            if state is not None:
                if np.isin(state.numpy(), pages).any():
                    intact = min(intact, copy.length - page_size)
                continue
            first_slots = copy.host_indices[::page_size].numpy()
            places = np.flatnonzero(np.isin(first_slots // page_size, pages))
            if len(places):
                intact = min(intact, int(places[0]) * page_size)
        return intact

    def _condemn(self, copy: DeviceCopy, intact: int) -> None:
        """Condemn what a load has brought after its first `intact` tokens."""
        parts = parts_of(copy.node, copy.length)
        node, begin, _ = next(part for part in reversed(parts) if part[2] > intact)
        if node.is_condemned:
            return  # Another load has brought damaged pages above.
        self._metrics.dropped.labels("damaged").inc(
            self._tree.condemn(node, max(0, intact - begin))
        )

    def _settle(self, copy: DeviceCopy) -> None:
        for component in copy.host_states:
            component.device.unlock(copy.node)
        for node, _, _ in parts_of(copy.node, copy.length):
            self._tree.host.unpin(node)
        self._tree.unlock(copy.node)

"""Picks the requests whose prompts are computed next, and gives them rows and slots."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.scheduler.batch import PrefillWork
from sglang.srt.managers.scheduler.policy import (
    AddOutcome,
    AddPlan,
    PrefillAdder,
    ceil_to_page,
    order_waiting,
)
from sglang.srt.managers.scheduler.prefix_report import PrefixEnds, complete_report
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    Lookup,
    MatchPrefixParams,
)
from sglang.srt.messages.io_struct import CachedTokensDetails, abort_reason

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.tree.tree_node import TreeNode
    from sglang.srt.observability.engine_metrics import Stage

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Prefix:
    """The cached part of a prompt. Its lock passes to the request, or is released."""

    slots: torch.Tensor
    """int64: device slots of the prefix."""
    node: TreeNode
    """Carries the lock."""
    from_device: int
    from_host: int
    found: tuple[int, int]
    """Tokens that L1 and L2 had, before any was loaded."""
    cut: int
    """Tokens after it that a missing recurrent state makes unusable."""
    branching: int | None
    """Tokens before the point where other prompts diverge from this one, if no recurrent state is
    cached there; else None."""
    no_load: str | None = None
    """Reason why less than L2 had is loaded."""


class PrefillScheduler:
    """Admits requests. `PrefillAdder` decides about numbers; this carries it out."""

    def __init__(
        self, state: SchedulerState, may_compute: Callable[[Req], bool] = lambda req: True
    ) -> None:
        """`may_compute`: whether the prompt of a waiting request may be computed here now."""
        self._state = state
        self._may_compute = may_compute
        self._blocked_by: tuple[int, int, bool] | None = None
        self._blocked_ticks = 0
        self._unawaited_load = -1
        self._scheduled: list[tuple[Req, _Prefix, float]] = []
        """Scheduled requests that are not reported yet: `_report`'s arguments."""
        self._padding_slot = torch.zeros(1, dtype=torch.int64, device=state.pools.device)
        self._shares_prompts = not state.tree.disable

    def schedule(self) -> tuple[list[PrefillWork], int] | None:
        """The next prefill batch, and the load from L2 that it must wait for (-1: none)."""
        state, queues = self._state, self._state.queues
        if queues.partial is None:
            is_full = queues.num_holders >= state.limits.max_running_requests
            if not queues.waiting or is_full:
                return None
            if self._blocked_by is not None and self._is_blocked():
                return None
        others = [req for req in queues.holders() if req is not queues.partial]
        reserved = sum(state.reserve_for(req) for req in others)
        adder = PrefillAdder(state.limits, len(others), reserved)
        works: list[PrefillWork] = []
        if queues.partial is not None:
            work = self._next_chunk(queues.partial, adder)
            if work is None:
                return None
            works.append(work)
        if queues.partial is None:
            self._add_waiting(adder, works)
        if state.hicache is not None:
            self.issue_loads(state.hicache)
        if not works:
            return None
        load, self._unawaited_load = self._unawaited_load, -1
        return works, load

    def issue_loads(self, hicache: HiRadixCache) -> None:
        """Issue the loads that are queued. The next batch waits for them: they fill slots that the
        tree shows, even if their request is not admitted after all."""
        if (load := hicache.ready_to_load_host_cache()) != -1:
            self._unawaited_load = load

    def hold(self, req: Req) -> tuple[AddOutcome, int]:
        """Hold a waiting request: lock the cached part of its prompt, load what L2 has of it, and
        allocate slots for the rest, which a transfer fills. If there is no room, the request does
        not change.

        Until its prompt is there, the tokens to come count as in flight. Its prefix is there once
        all loads that were issued up to now have settled: steps of a held request wait for none.

        Returns:
            The outcome, and the slots of the prompt that L1 did not have: loaded and allocated.
        """
        state, queues, progress = self._state, self._state.queues, req.progress
        others = list(queues.holders())
        # Another server computes the prompt, so the budgets of this server's batches do not apply.
        limits = dataclasses.replace(state.limits, chunk_tokens=None)
        reserved = sum(state.reserve_for(other) for other in others)
        adder = PrefillAdder(limits, len(others), reserved)
        prefix, plan = self._reuse(req, adder, needs_state=False)
        if state.hicache is not None:
            self.issue_loads(state.hicache)
        if plan.is_admitted:
            progress.kv_committed_len = prefix.slots.numel()
            rest = progress.uncommitted_tokens
            if self._alloc(req, rest, prefix.slots) is not None:
                self._commit(req, prefix)
                self._catch_up()
                progress.num_in_flight = rest
                queues.hold(req)
                return plan.outcome, prefix.from_host + ceil_to_page(rest, limits.page_size)
            progress.kv_committed_len = 0
            plan = AddPlan(AddOutcome.NO_MEMORY)
        state.tree.dec_lock_ref(prefix.node)
        return plan.outcome, 0

    def on_launched(self, works: list[PrefillWork]) -> None:
        """The device has the step in its queue. The tree may have its keys and values now, and
        copies of them may be queued: every reader is queued behind the step."""
        tree, snapshots = self._state.tree, self._state.snapshots
        self._catch_up()
        for work in works:
            req = work.req
            if work.first_state:
                tree.unpin_state(req.slots.last_node)
            if work.track_slot:
                req.slots.mamba_last_track_seqlen = req.progress.kv_committed_len + work.track_len
            req.progress.kv_committed_len += work.extend_len
            if not req.is_probe:
                tree.cache_unfinished_req(req.slots, chunked=not work.is_last_chunk)
            if snapshots is not None and work.end_slot:
                snapshots.on_counted(req)

    def _is_blocked(self) -> bool:
        """True if admission would fail again: nothing has changed since slots were short."""
        queues = self._state.queues
        if not queues.num_holders:
            return False
        if self._blocked_by != self._shortage():
            return False
        # Copies that end unlock pages though no request ends: try again every 16th tick.
        self._blocked_ticks += 1
        return self._blocked_ticks % 16 != 0

    def _next_chunk(self, req: Req, adder: PrefillAdder) -> PrefillWork | None:
        """The next part of the prompt that was cut; None: too few slots are free now."""
        plan = adder.plan_extend(req.progress.uncommitted_tokens)
        assert plan.is_admitted, "the cut prompt comes first, so there is budget"
        slots = self._alloc(req, plan.extend_tokens)
        if slots is None:
            return None
        rest = req.progress.uncommitted_tokens - plan.extend_tokens
        adder.commit(plan, rest + self._state.reserve_for(req))
        return self._start_work(req, plan, slots)

    def _start_work(
        self, req: Req, plan: AddPlan, slots: torch.Tensor, first_state: int = 0
    ) -> PrefillWork:
        """The next work of `req`, all that is left of its prompt or a part of it, with the snapshot
        that it leaves. The request counts as computing from now on."""
        snapshots, snapshot = self._state.snapshots, (0, 0, 0)
        if snapshots is not None:
            snapshot = snapshots.in_prefill(req, plan.extend_tokens)
        work = PrefillWork(req, plan.extend_tokens, slots, first_state, *snapshot)
        if plan.outcome is AddOutcome.CHUNKED:
            self._state.queues.cut(req)
        else:
            self._state.queues.admit(req)
        return work

    def _add_waiting(self, adder: PrefillAdder, works: list[PrefillWork]) -> None:
        state, queues = self._state, self._state.queues
        self._blocked_by = None
        added = {work.req.rid for work in works}
        for req in order_waiting(
            state.policy, queues.waiting, self._matched_tokens, queues.num_admitted
        ):
            first = req.spec.sample_of
            if req.progress.grammar_ticket is not None or not self._may_compute(req):
                continue
            if first is not None and self._waits_for_prompt(first, added):
                continue
            if state.awaits_l3(req):
                continue
            outcome, work = self._try_add(req, adder)
            if work is not None:
                works.append(work)
                added.add(req.rid)
                if outcome is AddOutcome.ADDED:
                    continue
            elif outcome is AddOutcome.NO_MEMORY:
                if not works and queues.num_holders == 0 and not state.tree.is_busy():
                    self._give_up(req)
                    continue
                self._blocked_by = self._shortage()
                self._blocked_ticks = 0
            break

    def _shortage(self) -> tuple[int, int, bool]:
        """The facts, besides pages, that admission depends on. While they stay the same, nothing
        has come free."""
        queues, snapshots = self._state.queues, self._state.snapshots
        has_state = snapshots is None or snapshots.has_room(queues.decoding)
        return queues.num_holders, len(queues.waiting), has_state

    def _waits_for_prompt(self, first: str, added: set[str]) -> bool:
        """True if a sample waits for request `first`, which computes their prompt and is not
        launched yet; this batch has the requests `added`. Once it is launched, the cache has the
        prompt."""
        queues = self._state.queues
        if not self._shares_prompts:
            return False
        ahead = queues.find(first)
        if ahead is None or not self._may_compute(ahead):
            return False
        return first in added or queues.is_prompt_ahead(first)

    def _matched_tokens(self, req: Req) -> int:
        match = self._state.tree.match_prefix(MatchPrefixParams(req.match_key(), req=req.slots))
        return len(match.device_indices) + match.host_hit_length

    def _try_add(self, req: Req, adder: PrefillAdder) -> tuple[AddOutcome, PrefillWork | None]:
        """Lock the cached part of the prompt, load it, and allocate the rest. If there is no room,
        nothing changes."""
        state, tree = self._state, self._state.tree
        prefix, plan = self._reuse(req, adder)
        progress = req.progress
        if plan.is_admitted:
            if state.hicache is not None and len(state.queues.waiting) == 1:
                # No other load can join: its bytes set out before the rest is done.
                self.issue_loads(state.hicache)
            plan = self._begin(req, prefix.slots.numel(), plan)
            first_state = 0
            if state.snapshots is not None:
                first_state = tree.pin_state(prefix.node)
                # The prompt is cut where it should leave a snapshot on its way.
                tokens = state.snapshots.shorten(
                    plan.extend_tokens, progress.kv_committed_len, prefix.branching
                )
                if tokens != plan.extend_tokens:
                    plan = AddPlan(AddOutcome.CHUNKED, tokens)
            slots = self._alloc(req, plan.extend_tokens, prefix.slots, zeroes_state=not first_state)
            if slots is not None:
                self._commit(req, prefix)
                rest = progress.uncommitted_tokens - plan.extend_tokens
                work = self._start_work(req, plan, slots, first_state)
                adder.commit(plan, rest + state.reserve_for(req))
                return plan.outcome, work
            if first_state:
                tree.unpin_state(prefix.node)
            progress.kv_committed_len = 0
            plan = AddPlan(AddOutcome.NO_MEMORY)
        tree.dec_lock_ref(prefix.node)
        return plan.outcome, None

    def _begin(self, req: Req, num_cached: int, plan: AddPlan) -> AddPlan:
        """Set where the computation of `req` begins, and return what is computed now.

        If the whole prompt is cached, its last token is computed again, for the logits. A draft
        layer needs the hidden state of the last cached token, so that token is always computed
        again, except in models with recurrent states, which store the hidden state with them.
        """
        state, progress = self._state, req.progress
        drafts = state.limits.decode_tokens > 1
        again = bool(num_cached) and drafts and state.pools.req_to_token_pool.mamba_pool is None
        progress.kv_committed_len = min(num_cached - again, progress.num_tokens - 1)
        tokens = min(plan.extend_tokens + again, progress.uncommitted_tokens)
        return AddPlan(plan.outcome, tokens)

    def _reuse(
        self, req: Req, adder: PrefillAdder, *, needs_state: bool = True
    ) -> tuple[_Prefix, AddPlan]:
        """Match and lock the prompt, plan, and if admitted queue the load of its host part."""
        state = self._state
        match = state.tree.match_prefix(
            MatchPrefixParams(req.match_key(), req=req.slots, needs_state=needs_state)
        )
        on_device, host = match.device_indices.numel(), match.host_hit_length
        prefix = _Prefix(
            slots=match.device_indices,
            node=match.last_device_node,
            from_device=on_device,
            from_host=0,
            found=(on_device, host),
            cut=match.mamba_cut_length,
            branching=match.mamba_branching_seqlen,
        )
        state.tree.inc_lock_ref(prefix.node)
        new_tokens = state.estimate.reserve(req.rest_new_tokens)
        rest = req.progress.num_tokens - on_device - host
        free = state.free_tokens()
        plan = adder.plan(rest, host, new_tokens, free)
        if not (host or match.mamba_host_hit_length) or not plan.is_admitted:
            return prefix, plan
        rest = ceil_to_page(rest, state.limits.page_size)
        quota = free - rest
        states = None
        if state.snapshots is not None and needs_state:
            states = state.snapshots.room_to_load(state.queues.decoding)
        params = InitLoadBackParams(
            match.best_match_node,
            host,
            mem_quota=quota,
            mamba_quota=states,
            needs_state=needs_state,
            req=req.slots,
            report=req.report.cache,
            rest=rest,
        )
        loaded, node = state.tree.init_load_back(params)
        prefix.no_load = params.refusal
        if node is not prefix.node:
            # The node is deeper by what was loaded, or higher up if a state to load has no room.
            state.tree.inc_lock_ref(node)
            state.tree.dec_lock_ref(prefix.node)
            depth = node.depth
            slots = torch.cat([prefix.slots, loaded]) if on_device else loaded
            prefix.node, prefix.slots = node, slots[:depth]
            prefix.from_device = min(on_device, depth)
            prefix.from_host = depth - prefix.from_device
        rest = req.progress.num_tokens - prefix.slots.numel()
        return prefix, adder.plan(rest, 0, new_tokens, state.free_tokens())

    def _alloc(
        self,
        req: Req,
        extend_tokens: int,
        prefix: torch.Tensor | None = None,
        *,
        zeroes_state: bool = True,
    ) -> torch.Tensor | None:
        """Slots for the keys and values of the next tokens, written to the request's row; None: too
        few slots are free, or no recurrent state is. A request without a row brings its `prefix`.
        `zeroes_state`: see `ReqToTokenPool.alloc`.

        A cached token that is computed again gets no slot: the step stores it as padding, and reads
        it from the cached page.
        """
        state, pools = self._state, self._state.pools
        committed = req.progress.kv_committed_len
        end = committed + extend_tokens
        begin = committed if prefix is None else prefix.numel()
        page_size = state.limits.page_size
        assert begin % page_size == 0, "what is cached or was computed before is whole pages"
        if req.slots.req_pool_idx is None:
            if state.snapshots is not None:
                state.snapshots.make_room(state.queues.decoding)
            if not pools.req_to_token_pool.available_size():
                return None
        slots = self._padding_slot
        if begin < end:
            state.make_room(end - begin, req)
            pages = pools.allocator.alloc(ceil_to_page(end, page_size) - begin)
            if pages is None:
                return None
            new = pages[: end - begin]
            slots = new if begin == committed else torch.cat([slots, new])
        rows = pools.req_to_token_pool.alloc([req.slots], zeroes_states=zeroes_state)
        assert rows is not None, "there is a row for it"
        if prefix is not None:
            pools.req_to_token_pool.write((rows[0], slice(0, begin)), prefix)
        if begin < end:
            pools.req_to_token_pool.write((rows[0], slice(begin, end)), new)
        return slots

    def _commit(self, req: Req, prefix: _Prefix) -> None:
        """The request is scheduled: it takes over the lock of `prefix`."""
        slots = req.slots
        slots.prefix_indices = prefix.slots
        slots.last_node = prefix.node
        slots.cache_protected_len = prefix.slots.numel()
        self._scheduled.append((req, prefix, time.monotonic()))

    def _catch_up(self) -> None:
        """Do what can wait for the launch, so that the device does not wait for it."""
        allocator = self._state.pools.allocator
        if not allocator.is_sorted:
            allocator.sort_free()
        for req, prefix, began in self._scheduled:
            self._report(req, prefix, began)
        self._scheduled.clear()

    def _report(self, req: Req, prefix: _Prefix, began: float) -> None:
        """Tell the tree, the client and the metrics that `req` was scheduled at `began`, in seconds
        of `time.monotonic()`. Its own pages are not in the tree yet."""
        tree = self._state.tree
        tree.note_scheduled(req.rid)
        from_storage, backend = 0, None
        if (hicache := self._state.hicache) is not None:
            backend = hicache.storage_backend_name
            # The first parts of a prompt that passed through a buffer are in L1 already.
            above = prefix.from_device if hicache.tree.host_is_buffer else 0
            read = hicache.pop_prefetch_loaded_tokens(req.rid)
            from_storage = min(read, prefix.from_host + above)
        if req.report.was_scheduled:
            return
        # For the client and the metrics: only its first prefill counts.
        device, host, storage = _reused_tokens(prefix, from_storage, req.progress.num_tokens)
        report = req.report
        report.was_scheduled = True
        report.queue_time = max(0.0, self._state.now - req.spec.created_time)
        report.stages.queue, report.stage_began = report.queue_time, began
        report.cached_tokens_details = CachedTokensDetails(
            device=device,
            host=host,
            storage=storage,
            storage_backend=backend,
        )
        if report.cache is not None:
            ends = PrefixEnds(
                device=prefix.found[0],
                host=prefix.found[1],
                used=prefix.slots.numel(),
                cut=prefix.cut,
                no_load=prefix.no_load,
            )
            complete_report(report.cache, ends, tree, req.match_key(), req.progress.num_tokens)
        if req.is_probe:
            return
        self._state.recent.on_scheduled(req)
        num_prompt = len(req.spec.input_ids)
        details = report.cached_tokens_details
        self._state.metrics.on_scheduled(num_prompt, details, report.queue_time)
        waits = report.stages.l3_wait
        stages: dict[Stage, float | None] = {"match": report.match_s, "l3_wait": waits}
        for stage, seconds in stages.items():
            if seconds is not None:
                self._state.metrics.observe_stage(stage, seconds)
        tree.count_lookup(Lookup(req.match_key(), num_prompt, device, host, storage, prefix.cut))

    def _give_up(self, req: Req) -> None:
        """Abort `req`: nothing runs or is in flight, and yet slots are short. Some are lost."""
        free = self._state.free_tokens()
        logger.error("no room for request %s though nothing runs: %d slots free", req.rid, free)
        message = f"the engine has {free} token slots left, too few for this request"
        self._state.queues.abort(req, abort_reason(message, 503))


def _reused_tokens(prefix: _Prefix, from_storage: int, num_tokens: int) -> tuple[int, int, int]:
    """Tokens of a request of `num_tokens` that are not computed, by the tier they come from:
    device, host, storage. L3 gave `from_storage` of them, the last ones first.

    If all are cached, the last token is computed nevertheless, and the lowest tier that contributed
    counts one less.
    """
    from_host = min(from_storage, prefix.from_host)
    device, host = prefix.from_device - (from_storage - from_host), prefix.from_host - from_host
    storage = from_storage
    if device + host + storage < num_tokens:
        return device, host, storage
    if storage:
        return device, host, storage - 1
    if host:
        return device, host - 1, storage
    return device - 1, host, storage

"""State that the parts of a scheduler share: the queues, the pools, the tree, the counts.

Every rank has the same state at every tick. `now` is rank 0's clock on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.layers.penalties import GrammarRow
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
from sglang.srt.managers.scheduler.batch import BatchPools
from sglang.srt.managers.scheduler.policy import (
    BatchLimits,
    NewTokenEstimate,
    SchedulePolicy,
    ceil_to_page,
)
from sglang.srt.managers.scheduler.requests.req import NO_SLOTS
from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, Workload
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.tenants import Evictor
from sglang.srt.messages.io_struct import Verifications
from sglang.srt.observability.engine_metrics import SchedulerLoad
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.parts import Parts, do_all

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.batch import DecodeBatch
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.snapshots import Snapshots
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.observability.engine_metrics import SchedulerMetrics


_GREEDY: Final = SamplingParams(top_k=1)


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start, for the internal state."""

    ticks: int = 0
    prefill_batches: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    retractions: int = 0
    redone: int = 0
    """Requests that started again because a page of their prefix was damaged."""
    decode_stalls: int = 0
    finished: int = 0
    aborted: int = 0


@dataclass(slots=True)
class RecentRequests:
    """Sums over the requests since the last status line of the log. Counts are tokens, times
    seconds."""

    scheduled: int = 0
    prompt_tokens: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    queue_s: float = 0.0
    """Sum of the times from arrival to first step."""
    first_tokens: int = 0
    """Number of requests whose first token came."""
    first_token_s: float = 0.0
    """Sum of the times from arrival to that token."""
    verifications: Verifications = field(default_factory=Verifications)

    def on_scheduled(self, req: Req) -> None:
        """`req` was scheduled for the first time."""
        details = req.report.cached_tokens_details
        self.scheduled += 1
        self.prompt_tokens += len(req.spec.input_ids)
        self.device += details.device
        self.host += details.host
        self.storage += details.storage
        self.queue_s += req.report.queue_time

    def on_first_token(self, req: Req, now: float) -> None:
        """The first token of `req` came at `now`, in seconds of `time.monotonic()`."""
        self.first_tokens += 1
        self.first_token_s += max(0.0, now - req.spec.created_time)

    def __str__(self) -> str:
        queue = self.queue_s / max(1, self.scheduled)
        first = self.first_token_s / max(1, self.first_tokens)
        verified = self.verifications
        accepted = f", mean accepted length {verified.accept_length:.2f}" if verified.count else ""
        return (
            f"since the last such line {self.scheduled} prompts of {self.prompt_tokens} tokens "
            f"(cached: device {self.device}, host {self.host}, storage {self.storage}), mean queue "
            f"{queue:.3f} s, mean first token {first:.3f} s{accepted}"
        )


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """State that the parts of a scheduler share. Only `queues` has the states of requests."""

    tree: RadixCache
    pools: BatchPools
    limits: BatchLimits
    policy: SchedulePolicy
    estimate: NewTokenEstimate
    decode_batch: DecodeBatch
    """Tensors of the requests that decode."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    metrics: SchedulerMetrics
    hicache: HiRadixCache | None
    """`tree`, if it has tiers below L1."""
    snapshots: Snapshots | None
    """None: the tree keeps no recurrent states."""
    backs_up_retracted: bool = False
    """True if the pages of retracted requests go to L2."""
    queues: RequestQueues = field(default_factory=RequestQueues)
    in_flight: LaunchedStep | None = None
    """The launched step whose results have not been processed."""
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    recent: RecentRequests = field(default_factory=RecentRequests)
    now: float = 0.0
    """`time.monotonic()` of rank 0 at the start of this tick."""

    def workload(self) -> Workload:
        """The parts of prompts that are yet to be computed."""
        computing = 0
        if self.in_flight is not None:
            computing = sum(work.extend_len for work in self.in_flight.works)
        if self.queues.partial is not None:
            computing += self.queues.partial.progress.uncommitted_tokens
        waiting = {
            req.rid: req.progress.num_tokens - req.progress.cached_on_arrival
            for req in self.queues.waiting
            if req.spec.sample_of is None  # Samples of one prompt compute it once.
        }
        return Workload(computing, waiting)

    def awaits_l3(self, req: Req) -> bool:
        """True if `req`, whose turn has come, has to wait for its read from L3. Its report counts
        the time."""
        if self.hicache is None:
            return False
        report, began = req.report, req.report.l3_wait_began
        if not self.hicache.check_prefetch_progress(req.rid):
            report.l3_wait_began = self.now if began is None else began
            return True
        if began is not None:
            report.stages.l3_wait = (report.stages.l3_wait or 0.0) + self.now - began
            report.l3_wait_began = None
        return False

    def free_tokens(self) -> int:
        """Slots that are free or can be evicted."""
        return self.pools.allocator.available_size() + self.tree.evictable_size()

    def has_device_copies(self) -> bool:
        """True if copies in flight keep device pages from being evicted."""
        busy = self.tree.is_busy()
        return "writes" in busy or "loads" in busy

    def load(self) -> SchedulerLoad:
        """Requests and device token slots now."""
        return SchedulerLoad(
            num_running=self.queues.num_holders,
            num_queued=len(self.queues.waiting),
            pool_tokens=self.limits.pool_tokens,
            free_tokens=self.pools.allocator.available_size(),
            evictable_tokens=self.tree.evictable_size(),
        )

    def token_counts(self) -> dict[str, int]:
        """Tokens since the start: of prompts, by where they came from (`computed`: nowhere); and by
        what the tiers did with them."""
        metrics = self.metrics
        found = {f"hit_{source}": tokens for source, tokens in metrics.num_cached.items()}
        computed = metrics.num_prompt - sum(found.values())
        return {**found, "computed": computed, **self.tree.metrics.flows()}

    def used_tokens(self) -> int:
        """Slots that are neither free nor evictable."""
        return self.load().used_tokens

    def make_room(self, tokens: int, req: Req | None = None) -> None:
        """Evict until `tokens`, rounded up to pages, are free, or nothing is left to evict. They
        are for the prompt of `req`; None: for the output of running requests."""
        tokens = ceil_to_page(tokens, self.limits.page_size)
        short = tokens - self.pools.allocator.available_size()
        if short > 0:
            by = None if req is None else Evictor(req.rid, req.spec.extra_key)
            self.tree.evict(EvictParams(num_tokens=short, by=by))

    def reserve_for(self, req: Req) -> int:
        """Slots that `req` is expected to need once its prompt is computed."""
        tokens = self.estimate.reserve(req.rest_new_tokens)
        return ceil_to_page(tokens, self.limits.page_size)

    def release(self, req: Req) -> None:
        """Give back all that `req` holds on the device. The tree gets its slots (the slots of a
        probe are freed), the pool gets its row.

        Slots of a decode step in flight are freed too. That is no race: their next use is queued
        behind that step.
        """
        rows = self.pools.req_to_token_pool
        slots, progress = req.slots, req.progress
        self.trim(req, progress.num_in_flight)
        self.tree.cache_finished_req(slots, is_insert=not req.is_probe)
        rows.free(slots)
        if slots.history is not None:
            slots.history.forget()
        progress.kv_committed_len = 0
        slots.prefix_indices = NO_SLOTS
        if self.snapshots is not None:
            self.snapshots.release(req)

    def trim(self, req: Req, count: int) -> None:
        """Give back whole pages of slots of the last `count` tokens in flight of `req`. The tokens
        are rejected drafts, whose step has ended, or the request ends. In the second case a step in
        flight may still write to the slots."""
        rows, allocator, progress = (
            self.pools.req_to_token_pool, self.pools.allocator, req.progress,
        )  # fmt: skip
        end = progress.next_seq_len
        progress.num_in_flight -= count
        begin = ceil_to_page(progress.next_seq_len, allocator.page_size)
        if begin < end:
            allocator.free_in_order(rows.req_to_token[req.slots.row, begin:end].to(torch.int64))

    def check_integrity(self) -> None:
        """`integrity_parts`, all at once."""
        do_all(self.integrity_parts())

    def integrity_parts(self) -> Parts:
        """Check that every slot and every recurrent state has one owner; else raise AssertionError.
        In parts: nothing may change between two of them."""
        rows = self.pools.req_to_token_pool
        holders = [req.slots for req in self.queues.holders()]
        spare = [slot for one in holders for slot in (one.mamba_track_slot, one.snapshot_slot)]
        states = [slot for slot in spare if slot is not None]
        if rows.mamba_pool is not None:
            running = rows.running_states()
            assert len(running) == len(holders), "states of no request"
            if not self.tree.supports_mamba():
                owned = len(running) + rows.mamba_pool.available_size()
                assert owned == rows.mamba_pool.size, "states without owner"
            states.append(torch.tensor(running, dtype=torch.int64))
        yield from self.tree.integrity_parts([one.own_slots(rows) for one in holders], states)

    def sampling_info(
        self, reqs: Sequence[Req], samples: Sequence[bool] | None = None, *, width: int = 1
    ) -> SamplingBatchInfo:
        """Sampling parameters of a batch, its requests' history included.

        Args:
            reqs: Each has `width` rows. If its sampling depends on its history, which ends before
                the second of them, the others are sampled greedily, and no result uses them.
            samples: True for each request whose token is used; None: all are.
        """
        grammars = []
        for nth, req in enumerate(reqs):
            progress, params = req.progress, req.spec.sampling_params
            if progress.matcher is not None and (samples is None or samples[nth]):
                ends = (*self.eos_token_ids, *(params.stop_token_ids or ()))
                least, row = params.min_new_tokens, nth * width
                grammars.append(GrammarRow(row, progress.matcher, progress.output_ids, least, ends))
        params_of_rows = []
        for req in reqs:
            own = req.spec.sampling_params
            params_of_rows.append(own)
            if width > 1:
                others = _GREEDY if req.is_sampled_by_history else own
                params_of_rows += [others] * (width - 1)
        return SamplingBatchInfo.from_reqs(
            params_of_rows,
            self.vocab_size,
            self.pools.device,
            eos_token_ids=self.eos_token_ids,
            histories=[req.slots.history for req in reqs for _ in range(width)],
            grammars=grammars,
        )


def busy_text(busy: dict[str, int]) -> str:
    """The refusal of a change that only an idle scheduler makes."""
    counts = ", ".join(f"{kind} {count}" for kind, count in busy.items())
    return f"busy: {counts}; try again when idle"

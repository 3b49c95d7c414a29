"""Makes room for one more token of each request that decodes; retracts some if slots are short."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.policy import newest, pages_to_decode
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.messages.io_struct import abort_reason
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class DecodeScheduler:
    """Prepares decode steps. While `is_stalled`, slots are short and will come back from copies in
    flight: no request is admitted or retracted."""

    def __init__(
        self,
        state: SchedulerState,
        verifies_ahead: Callable[[int], bool] = lambda batch_size: False,
    ) -> None:
        """`verifies_ahead`: See `TpModelWorker.verifies_ahead`."""
        self._state = state
        self._verifies_ahead = verifies_ahead
        self._log = RateLimitedLogger(logger)
        self.sampling_info: SamplingBatchInfo | None = None
        """Sampling parameters of the prepared step; None: they have to be collected."""
        self.is_stalled = False

    def gather(self) -> int:
        """Bring the batch up to date with the requests that decode; return its size."""
        state = self._state
        state.decode_batch.update(state.queues, in_flight=state.in_flight is not None)
        return len(state.decode_batch.reqs)

    def can_run_ahead(self) -> bool:
        """True if the next step can be prepared before the step in flight is processed."""
        state, batch, info = self._state, self._state.decode_batch, self.sampling_info
        if batch.width > 1:
            assert state.in_flight is not None, "only then it matters"
            if state.in_flight.works:
                return True
            # A row has no more slots than those of one verification at the longest context.
            return self._verifies_ahead(len(batch.reqs)) and not any(
                req.is_sampled_by_history or req.progress.next_seq_len >= state.limits.context_len
                for req in batch.reqs
            )
        if info is None or batch.is_stale:
            return not any(req.is_sampled_by_history for req in batch.reqs)
        # Penalties are counted on the device; a grammar moves on the CPU.
        return info.grammar is None

    def prepare(self) -> bool:
        """Give every request of the gathered batch a slot; evict as needed. False: no step can run
        in this tick, or only after the step in flight is processed. Requests are retracted only
        while no step is in flight, because only then all ended requests are known."""
        state = self._state
        batch = state.decode_batch
        while batch.reqs:
            state.make_room(self._needed_tokens())
            if batch.is_stale:
                self.sampling_info = None
            if batch.prepare():
                self.is_stalled = False
                if self.sampling_info is None:
                    self.sampling_info = state.sampling_info(batch.reqs, width=batch.width)
                state.estimate.on_decode_step()
                return True
            if state.in_flight is not None:
                return False
            if self.is_stalled and state.has_device_copies():
                state.counters.decode_stalls += 1
                return False
            self._retract()
            if self.is_stalled:
                state.counters.decode_stalls += 1
                return False
        self.is_stalled = False
        return False

    def _needed_tokens(self) -> int:
        page_size, batch = self._state.limits.page_size, self._state.decode_batch
        return pages_to_decode(batch.next_seq_lens(), page_size, batch.width) * page_size

    def _retract(self) -> None:
        """Retract the newest requests, at least one, until the others have room.

        Their computed pages go to the tree, where they can be evicted, though not while they are
        being copied (`is_stalled`).
        """
        state, queues = self._state, self._state.queues
        reqs = state.decode_batch.reqs
        state.estimate.on_retraction(
            sum(len(req.progress.output_ids) for req in reqs),
            sum(req.max_new_tokens for req in reqs),
        )
        coming = 0
        while True:
            # A transfer that fills or reads the slots of a held request cannot be stopped.
            computing = [req for req in queues.computing if not req.decodes_elsewhere]
            candidates = [*queues.decoding, *computing]
            if queues.num_holders == 1:
                self._stall_or_give_up(candidates[0])
                return
            req = newest(candidates)
            held, free_before = req.progress.kv_committed_len, state.free_tokens()
            self._retract_one(req)
            if state.has_device_copies():
                # Pages that are being copied come back later.
                coming += max(0, held - (state.free_tokens() - free_before))
            if state.free_tokens() + coming >= self._needed_tokens():
                break
        self.is_stalled = state.free_tokens() < self._needed_tokens()

    def _retract_one(self, req: Req) -> None:
        state = self._state
        self._log.info(
            "retraction",
            "out of slots: request %s is retracted after %d tokens; %d go on",
            req.rid,
            len(req.progress.output_ids),
            state.queues.num_holders - 1,
        )
        state.release(req)
        state.queues.retract(req)
        if state.backs_up_retracted and not req.is_probe:
            self._back_up(req)
        self.gather()
        state.counters.retractions += 1
        state.metrics.retractions.inc()

    def _back_up(self, req: Req) -> None:
        """Copy to L2 what only L1 has of a retracted request. The tree has its pages: they stay in
        L1 until their copies have landed, and are loaded when the request is scheduled again. L2
        evicts pages of waiting requests last. A state in the request's row is not kept: it is empty
        where the pages end."""
        state, hicache = self._state, self._state.hicache
        assert hicache is not None, "otherwise nothing is backed up"
        match = hicache.match_prefix(
            MatchPrefixParams(req.match_key(), req=req.slots, needs_state=False)
        )
        node = match.last_host_node
        hicache.note_waiting(req.rid, req.arrival_number, node)
        hicache.request_reads.expect(req.rid, req.match_key())
        lost = hicache.host_backup.back_up(hicache.tree.path_to(node))
        state.metrics.on_backed_up(node.depth - lost, lost)
        if lost:
            self._log.warning(
                "retraction-backup",
                "L2 has no room for %d of %d tokens of the retracted request %s: it computes again "
                "what leaves L1 meanwhile",
                lost,
                node.depth,
                req.rid,
            )

    def _stall_or_give_up(self, req: Req) -> None:
        """Wait for copies in flight to release slots that `req` lacks, or abort it. No other
        request holds slots."""
        self.is_stalled = True
        if self._state.has_device_copies():
            return
        logger.error("request %s is alone in the pool and lacks slots: some were lost", req.rid)
        message = "the engine ran out of token slots"
        self._state.queues.abort(req, abort_reason(message, 503))

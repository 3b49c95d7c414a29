"""Makes room for one more token of each running request; decides who gives way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.batch_pools import release_slots
from sglang.srt.managers.scheduler.policy import newest, pages_to_decode
from sglang.srt.managers.scheduler.req import Req
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class DecodeScheduler:
    """Prepares decode steps.

    Attributes:
        is_stalled: Slots are short and will come back from copies in flight: nothing is admitted
            and nobody else gives way until then.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._say = RateLimitedLogger(logger)
        self._sampling_info: SamplingBatchInfo | None = None
        self.is_stalled = False

    def prepare(self, *, can_retract: bool) -> bool:
        """Give every running request a slot, evicting and retracting as needed.

        False: nothing can run in this tick, or, where it may not retract, not yet.

        Args:
            can_retract: Whether no step is in flight, so that every request's end is known.
        """
        state = self._state
        batch = state.decoding
        while len(batch):
            state.make_room(self._needed_tokens())
            if batch.is_stale:
                self._sampling_info = None
            if batch.prepare():
                self.is_stalled = False
                if self._sampling_info is None:
                    self._sampling_info = state.sampling_info(batch.reqs)
                state.estimate.on_decode_step()
                return True
            if not can_retract:
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

    def can_run_ahead(self) -> bool:
        """Whether the next step can be prepared before the tokens of the last are known."""
        batch, info = self._state.decoding, self._sampling_info
        if info is None or batch.is_stale:
            return not any(req.is_sampled_by_history for req in batch.reqs)
        # Penalties are counted on the device; a grammar moves on the CPU.
        return info.grammar is None

    @property
    def sampling_info(self) -> SamplingBatchInfo:
        """Of the batch that was prepared."""
        assert self._sampling_info is not None
        return self._sampling_info

    def _needed_tokens(self) -> int:
        page_size = self._state.limits.page_size
        return pages_to_decode(self._state.decoding.next_seq_lens(), page_size) * page_size

    def _retract(self) -> None:
        """Let the newest requests give way, one at least, until the others have room.

        What they computed goes to the tree, where it can be evicted; where copies of it are in
        flight, that takes a moment (`is_stalled`).
        """
        state = self._state
        reqs = state.decoding.reqs
        state.estimate.on_retraction(
            sum(len(req.output_ids) for req in reqs), sum(req.max_new_tokens for req in reqs)
        )
        coming = 0
        while True:
            candidates = list(state.running())
            if len(candidates) == 1:
                self._alone(candidates[0])
                return
            req = newest(candidates)
            held, free_before = req.kv_committed_len, state.free_tokens()
            self._retract_one(req)
            if state.has_device_copies():
                # Pages under a copy come back, but not at once.
                coming += max(0, held - (state.free_tokens() - free_before))
            if state.free_tokens() + coming >= self._needed_tokens():
                break
        self.is_stalled = state.free_tokens() < self._needed_tokens()

    def _retract_one(self, req: Req) -> None:
        state = self._state
        self._say.info(
            "retraction",
            "out of slots: request %s gives way after %d tokens; %d go on",
            req.rid,
            len(req.output_ids),
            state.num_running - 1,
        )
        if req is state.chunked:
            state.chunked = None
        else:
            state.decoding.keep([other for other in state.decoding.reqs if other is not req])
        release_slots(req, state.tree, state.pools)
        state.queues.retract(req)
        state.counters.retractions += 1
        state.metrics.retractions.inc()

    def _alone(self, req: Req) -> None:
        """One request has the pool to itself and is short: only copies can hold slots."""
        if self._state.has_device_copies():
            self.is_stalled = True
            return
        logger.error("request %s alone is out of slots: slots have been lost", req.rid)
        message = "the engine ran out of token slots"
        reason = FinishReason(type="abort", message=message, status_code=503)
        self._state.queues.abort(req, reason)
        self.is_stalled = True

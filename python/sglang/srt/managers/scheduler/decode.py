"""Makes room for one more token of each request that decodes, by retracting some where it must."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.policy import newest, pages_to_decode
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.managers.scheduler.batch import DecodeBatch
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep
    from sglang.srt.managers.scheduler.policy import BatchLimits, NewTokenEstimate
    from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues
    from sglang.srt.managers.scheduler.state import SchedulerCounters
    from sglang.srt.observability.scheduler_metrics import SchedulerMetrics

logger = logging.getLogger(__name__)


class DecodeView(Protocol):
    """What decoding sees of a scheduler: see `SchedulerState`."""

    @property
    def queues(self) -> RequestQueues: ...
    @property
    def decode_batch(self) -> DecodeBatch: ...
    @property
    def in_flight(self) -> LaunchedStep | None: ...
    @property
    def limits(self) -> BatchLimits: ...
    @property
    def estimate(self) -> NewTokenEstimate: ...
    @property
    def counters(self) -> SchedulerCounters: ...
    @property
    def metrics(self) -> SchedulerMetrics: ...
    def make_room(self, tokens: int) -> None: ...
    def free_tokens(self) -> int: ...
    def has_device_copies(self) -> bool: ...
    def release(self, req: Req) -> None: ...
    def sampling_info(
        self, reqs: Sequence[Req], samples: Sequence[bool] | None = None
    ) -> SamplingBatchInfo: ...


class DecodeScheduler:
    """Prepares decode steps.

    Attributes:
        is_stalled: Slots are short and will come back from copies in flight: until then nothing is
            admitted and nothing more is retracted.
    """

    def __init__(
        self, state: DecodeView, is_kept: Callable[[Req], bool] = lambda req: False
    ) -> None:
        """Args:
        is_kept: Whether what is computed of a request's prompt must stay where it is, since another
            server reads it.
        """
        self._state = state
        self._is_kept = is_kept
        self._say = RateLimitedLogger(logger)
        self._sampling_info: SamplingBatchInfo | None = None
        self.is_stalled = False

    def gather(self) -> int:
        """Bring the batch up to date with the requests that decode; how many the next step has."""
        state = self._state
        state.decode_batch.follow(state.queues, in_flight=state.in_flight is not None)
        return len(state.decode_batch)

    def can_run_ahead(self) -> bool:
        """Whether the next step of the gathered batch can be prepared before the tokens of the last
        step are known."""
        batch, info = self._state.decode_batch, self._sampling_info
        if info is None or batch.is_stale:
            return not any(req.is_sampled_by_history for req in batch.reqs)
        # Penalties are counted on the device; a grammar moves on the CPU.
        return info.grammar is None

    def prepare(self) -> bool:
        """Give every request of the gathered batch a slot, evicting as needed, and retracting where
        no step is in flight: then every request's end is known.

        False: nothing can run in this tick, or not before the step in flight is processed.
        """
        state = self._state
        batch = state.decode_batch
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

    @property
    def sampling_info(self) -> SamplingBatchInfo:
        """Sampling parameters of the prepared batch."""
        assert self._sampling_info is not None
        return self._sampling_info

    def _needed_tokens(self) -> int:
        page_size = self._state.limits.page_size
        return pages_to_decode(self._state.decode_batch.next_seq_lens(), page_size) * page_size

    def _retract(self) -> None:
        """Retract the newest requests, one at least, until the others have room.

        What they computed goes to the tree, where it can be evicted; where copies of it are in
        flight, that takes a moment (`is_stalled`).
        """
        state, queues = self._state, self._state.queues
        reqs = state.decode_batch.reqs
        state.estimate.on_retraction(
            sum(len(req.progress.output_ids) for req in reqs),
            sum(req.spec.max_new_tokens for req in reqs),
        )
        coming = 0
        while True:
            # What fills or reads the slots of a held request cannot be told to stop.
            computing = [req for req in queues.computing if not self._is_kept(req)]
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
        self._say.info(
            "retraction",
            "out of slots: request %s is retracted after %d tokens; %d go on",
            req.rid,
            len(req.progress.output_ids),
            state.queues.num_holders - 1,
        )
        state.release(req)
        state.queues.retract(req)
        self.gather()
        state.counters.retractions += 1
        state.metrics.retractions.inc()

    def _stall_or_give_up(self, req: Req) -> None:
        """No other request holds slots and `req` is short: only copies can hold the others."""
        self.is_stalled = True
        if self._state.has_device_copies():
            return
        logger.error("request %s has the pool to itself and no slots: some were lost", req.rid)
        message = "the engine ran out of token slots"
        reason = FinishReason(type="abort", message=message, status_code=503)
        self._state.queues.abort(req, reason)

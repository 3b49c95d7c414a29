"""The scheduler of one rank: every tick it takes messages in, runs at most one batch, and gives
out what that produced.

`step` is the whole of it and does no I/O of its own; `run` is the loop around it. Ranks that are
given the same ticks decide the same: the state and the message order decide, and what the ranks
agree on in the cache's ballot, never a clock or a finished copy of one rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.managers.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    FinishReason,
    ToScheduler,
)
from sglang.srt.managers.messages.tick import Tick, decode_tick, encode_tick
from sglang.srt.managers.scheduler.batch import (
    DecodeBatch,
    ModelWorkerBatch,
    make_prefill_batch,
)
from sglang.srt.managers.scheduler.batch_pools import BatchPools
from sglang.srt.managers.scheduler.control import ControlHandler
from sglang.srt.managers.scheduler.decode import DecodeScheduler
from sglang.srt.managers.scheduler.grammar import GrammarQueue
from sglang.srt.managers.scheduler.input import InputHandler
from sglang.srt.managers.scheduler.launched_step import LaunchedStep, StepResult
from sglang.srt.managers.scheduler.output import OutputCollector
from sglang.srt.managers.scheduler.policy import (
    BatchLimits,
    NewTokenEstimate,
    SchedulePolicy,
    Turns,
)
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.results import ResultProcessor
from sglang.srt.managers.scheduler.state import SchedulerState
from sglang.srt.managers.scheduler.stop import StopChecker
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarBackend
    from sglang.srt.managers.detokenizer.incremental_detokenizer import DecoderFactory
    from sglang.srt.managers.scheduler.tp_worker import ModelWorker
    from sglang.srt.mem_cache.tree.base_prefix_cache import BasePrefixCache
    from sglang.srt.observability.scheduler_metrics import SchedulerMetrics
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_IDLE_POLL_MS: Final = 1000
_BUSY_POLL_MS: Final = 1
_SHUT_DOWN = FinishReason(type="abort", message="the server is shutting down", status_code=503)

SchedulerOutput = BatchTokenIDOutput | ControlReqOutput


class Channel(Protocol):
    """Rank 0's way to the other processes."""

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        """Messages that are there, after waiting at most `timeout_ms` for the first."""

    def send(self, output: SchedulerOutput) -> None:
        """Pass on one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """What a scheduler is made of, built by `managers/scheduler/process.py` or a test."""

    worker: ModelWorker
    tree: BasePrefixCache
    metrics: SchedulerMetrics
    group: RankGroup = field(default_factory=SingleRank)
    """The ranks; the tree's, too."""
    new_decoder: DecoderFactory | None = None
    """For stop strings and patterns; None: no request may have any."""
    grammar_backend: Callable[[], GrammarBackend] | None = None
    """Makes the grammar backend when a request first needs it; None: constraints are refused.
    Raises ValueError where the model cannot be constrained."""
    overlap: bool = False
    """Prepare each step while the device runs the one before it. Worth it where launching a
    forward returns at once."""
    forward_guard: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around launching a forward and around waiting for its end; the watchdog's."""


class Scheduler:
    """Continuous batching over one model worker. One thread uses it.

    A tick launches either a prefill batch or a decode step; where both could be, `Turns` says
    which, so that neither starves. With `overlap` the tick then takes in the
    step that was launched in the tick before: the device runs one while the CPU is busy with the
    other. Tokens are the same: a request that turns out to have ended has run one step too many,
    which is dropped.
    """

    def __init__(self, server_args: ServerArgs, parts: SchedulerParts) -> None:
        """
        Args:
            server_args: Resolved.
            parts: The worker's pools and `parts.tree` must be each other's.
        """
        self._parts = parts
        self._state = _make_state(server_args, parts)
        outputs = OutputCollector(server_args.stream_interval)
        self._outputs = outputs
        parts.tree.watch_workload(self._state.workload)
        parts.tree.watch_queues(self._state.queues)
        self._control = ControlHandler(self._state, outputs, server_args.to_public_dict())
        stops = StopChecker(parts.new_decoder, parts.group)
        self._results = ResultProcessor(self._state, stops, outputs)
        self._grammar = GrammarQueue(parts.grammar_backend)
        self._input = InputHandler(
            self._state, self._control, self._results, outputs, self._grammar
        )
        self._prefill = PrefillScheduler(self._state)
        self._decode = DecodeScheduler(self._state)
        self._turns = Turns(server_args.target_inter_token_latency)
        self._last_end = 0.0
        self._did_forward = False
        self._is_verified = False
        self._say = RateLimitedLogger(logger)
        self.is_stopped = False

    @property
    def state(self) -> SchedulerState:
        """Queues, pools and counts; for tests and the start-up message."""
        return self._state

    def step(self, tick: Tick) -> list[SchedulerOutput]:
        """One tick: messages in, at most one batch, outputs out."""
        state = self._state
        state.now = tick.now
        state.counters.ticks += 1
        for message in tick.messages:
            self._input.handle(message)
        state.tree.check_hicache_events()
        if self._control.is_drained():
            self._input.abort(None, _SHUT_DOWN)
            self.is_stopped = True
        self._grammar.follow(tick.grammars, state.queues)
        if self._input.has_aborted():
            self._settle()
            self._input.end_aborted()
        self._control.tick()
        self._did_forward = not self.is_stopped and self._run_batch()
        if self._did_forward:
            self._is_verified = False
            self._say_status()
        return self._outputs.take()

    def run(self, channel: Channel) -> None:
        """Rank 0's loop: make ticks, give them to every rank and step, until a shutdown is
        complete.

        Args:
            channel: Where messages come from and go to.
        """
        while not self.is_stopped:
            timeout = self.poll_timeout_ms()
            messages = channel.receive(timeout)
            # A busy server has no time to check its books between two requests.
            is_idle = timeout == _IDLE_POLL_MS and not messages
            if is_idle and self._is_verified and not self._state.tree.needs_tick:
                continue  # The other ranks wait as this one does.
            tick = self.make_tick(time.monotonic(), messages, is_idle=is_idle)
            if self._parts.group.size > 1:
                self._parts.group.broadcast(encode_tick(tick))
            for output in self._step_or_verify(tick):
                channel.send(output)

    def run_beside(self) -> None:
        """The loop of every other rank: step by rank 0's ticks until a shutdown is complete. The
        outputs are dropped, since rank 0 sends them."""
        while not self.is_stopped:
            self._step_or_verify(decode_tick(self._parts.group.broadcast(None)))

    def make_tick(
        self, now: float, messages: Sequence[ToScheduler] = (), *, is_idle: bool = False
    ) -> Tick:
        """Rank 0: the next tick, for all ranks to `step`.

        Args:
            now: `time.monotonic()` seconds.
            messages: What has come since the last.
            is_idle: Nothing has, for a while.
        """
        state = self._state
        is_full = len(state.waiting) >= state.limits.max_queued_requests
        # Nothing is compiled for requests that are going to be refused.
        coming = () if is_full or self._control.is_draining else messages
        return Tick(now, messages, self._grammar.look(state.queues, coming), is_idle)

    def _step_or_verify(self, tick: Tick) -> list[SchedulerOutput]:
        if tick.is_idle:
            self.verify_once()
        return self.step(tick)

    def close(self) -> None:
        """End the threads of the cache and what compiles grammars."""
        self._grammar.close()
        self._state.tree.shutdown()

    def is_idle(self) -> bool:
        """Whether there is nothing to do until a message comes."""
        return not self._control.busy() and not self._control.is_waiting

    def poll_timeout_ms(self) -> int:
        """How long the loop may wait for a message."""
        if self._did_forward:
            return 0
        return _IDLE_POLL_MS if self.is_idle() else _BUSY_POLL_MS

    def verify_once(self) -> None:
        """Check the books, once after each time that something ran.

        Raises:
            AssertionError: Slots were lost or have two owners.
        """
        if self._is_verified:
            return
        pool = self._state.pools.req_to_token_pool
        self._state.tree.check_integrity([req.own_slots(pool) for req in self._state.running()])
        self._is_verified = True

    def _run_batch(self) -> bool:
        """Launch a prefill batch or a decode step, and take in the one before it, which the
        device has been running meanwhile. False: there was nothing to do."""
        state = self._state
        was_in_flight = state.in_flight is not None
        launched = self._launch()
        # While the device computes: issuing copies takes the CPU milliseconds.
        state.tree.start_writing_host_cache()
        before, state.in_flight = state.in_flight, launched
        if before is not None:
            self._take_in(before)
        if launched is not None and not self._parts.overlap:
            self._settle()
        return launched is not None or was_in_flight

    def _settle(self) -> None:
        """Take in the step in flight, so that what every request has is known."""
        step, self._state.in_flight = self._state.in_flight, None
        if step is not None:
            self._take_in(step)

    def _take_in(self, step: LaunchedStep) -> None:
        with self._parts.forward_guard():
            self._results.take_in(step)
        now = time.monotonic()
        if step.is_prefill:
            # It ran alone from the end of the step before it on.
            seconds = now - max(step.launched, self._last_end)
            self._state.tree.note_prefill(sum(work.extend_len for work in step.works), seconds)
        self._last_end = now

    def _launch(self) -> LaunchedStep | None:
        """The next step, on its way; None: nothing can run."""
        state, decoding = self._state, self._state.decoding
        is_prefill_turn = not len(decoding) or (
            self._turns.is_prefills(state.now) and not self._decode.is_stalled
        )
        step = self._launch_prefill() if is_prefill_turn else None
        if step is None and not len(decoding) and state.in_flight is not None:
            # What comes of it is all there is to decode. First tokens go out before the next tick
            # launches their second: that takes the CPU a millisecond.
            self._settle()
            return None
        return step or self._launch_decode()

    def _launch_prefill(self) -> LaunchedStep | None:
        state = self._state
        if state.chunked is not None and state.chunked.logprob_start_len >= 0:
            self._settle()  # The next part goes on where its logprobs end.
        before = state.in_flight
        if before is not None and before.mostly_done is not None:
            # Else launching blocks half way, where the driver's queue is full, and holds the
            # interpreter while it does: the threads of L3 get nothing done in long prefills.
            with self._parts.forward_guard():
                before.mostly_done.synchronize()
        scheduled = self._prefill.schedule()
        if scheduled is None:
            return None
        works, load = scheduled
        info = state.sampling_info(
            [work.req for work in works], [work.is_last_chunk for work in works]
        )
        batch = make_prefill_batch(works, state.pools, info, load)
        if self._parts.overlap:
            batch.forward.mostly_done = device_runtime(state.pools.device).make_event()
        started = time.monotonic()
        result, _ = self._forward(batch)
        self._turns.on_prefill(state.now)
        self._prefill.on_launched(works)
        return LaunchedStep(
            result=result, launched=started, works=works, mostly_done=batch.forward.mostly_done
        )

    def _launch_decode(self) -> LaunchedStep | None:
        decoding = self._state.decoding
        if not self._prepare_decode():
            return None
        info = self._decode.sampling_info
        batch = decoding.worker_batch(info)
        started = time.monotonic()
        result, token_ids = self._forward(batch)
        self._turns.on_decode()
        info.accumulate(token_ids)
        decoding.advance(token_ids)
        return LaunchedStep(result=result, launched=started, reqs=list(decoding.reqs))

    def _forward(self, batch: ModelWorkerBatch) -> tuple[StepResult, torch.Tensor]:
        """Launch a forward: what comes of it, and its int64 `[bs]` tokens on the device."""
        with self._parts.forward_guard():
            output, token_ids = self._parts.worker.forward_batch_generation(batch)
            return StepResult(output, token_ids), token_ids

    def _prepare_decode(self) -> bool:
        """Slots and sampling for the next decode step. False: none can run."""
        state, decoding = self._state, self._state.decoding
        if state.in_flight is not None:
            decoding.keep([req for req in decoding.reqs if not req.ends_in_flight])
            if not self._decode.can_run_ahead():
                self._settle()
        if not len(decoding):
            return False
        if self._decode.prepare(can_retract=state.in_flight is None):
            return True
        if state.in_flight is None:
            return False
        # Requests that end with it may give back what is missing; else somebody gives way.
        self._settle()
        return len(decoding) > 0 and self._decode.prepare(can_retract=True)

    def _say_status(self) -> None:
        state = self._state
        self._say.info(
            "status",
            "running %d, waiting %d, slots %d/%d, prefill tokens %d, decode steps %d",
            state.num_running,
            len(state.waiting),
            state.used_tokens(),
            state.limits.pool_tokens,
            state.counters.prefill_tokens,
            state.counters.decode_steps,
        )


def _make_state(server_args: ServerArgs, parts: SchedulerParts) -> SchedulerState:
    worker = parts.worker
    allocator = worker.token_to_kv_pool_allocator
    chunk = server_args.chunked_prefill_size
    pools = BatchPools(
        req_to_token_pool=worker.req_to_token_pool,
        allocator=allocator,
        token_to_kv_pool=worker.token_to_kv_pool,
        device=torch.device(allocator.device),
    )
    return SchedulerState(
        tree=parts.tree,
        pools=pools,
        limits=BatchLimits(
            page_size=allocator.page_size,
            max_running_requests=worker.req_to_token_pool.size,
            max_queued_requests=server_args.max_queued_requests,
            max_prefill_tokens=server_args.max_prefill_tokens,
            chunk_tokens=None if chunk in (None, -1) else chunk,
            pool_tokens=allocator.size,
            context_len=worker.context_len,
        ),
        policy=SchedulePolicy(server_args.schedule_policy),
        estimate=NewTokenEstimate(server_args.schedule_conservativeness),
        decoding=DecodeBatch(pools),
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
        metrics=parts.metrics,
    )

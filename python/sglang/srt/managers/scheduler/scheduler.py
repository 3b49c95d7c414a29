"""The scheduler of one rank: in every tick it handles messages, launches at most one batch, and
returns its outputs.

`step` is one tick and does no I/O of its own; `run` is the loop around it. Ranks with the same
ticks decide the same. Decisions depend on the state, on the order of messages, and on what the
ranks have agreed on (the cache's tick sync, the status of transfers). They never depend on the
clock or on the copies of one rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch, make_prefill_batch
from sglang.srt.managers.scheduler.control import ControlHandler, InputHandler
from sglang.srt.managers.scheduler.decode import DecodeScheduler
from sglang.srt.managers.scheduler.draft_policy import DraftPolicy
from sglang.srt.managers.scheduler.grammar import GrammarManager
from sglang.srt.managers.scheduler.initial_state import make_state
from sglang.srt.managers.scheduler.launched_step import (
    LaunchedStep,
    StepResult,
    explaining_out_of_memory,
)
from sglang.srt.managers.scheduler.policy import BatchPolicy
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.profiler import StepProfiler
from sglang.srt.managers.scheduler.requests.stop import StopChecker
from sglang.srt.managers.scheduler.results import OutputCollector, ResultProcessor
from sglang.srt.managers.scheduler.role import Role
from sglang.srt.managers.scheduler.role_switch import MakeRole, RemakeRole, RoleSwitch
from sglang.srt.managers.scheduler.state import RecentRequests
from sglang.srt.messages.io_struct import (
    PDRoleSwitchReqInput,
    SchedulerOutput,
    Tick,
    ToScheduler,
    abort_reason,
    decode_tick,
    encode,
)
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.srt.utils.parts import Parts

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
    from sglang.srt.managers.detokenizer.detokenizer_manager import DecoderFactory
    from sglang.srt.managers.scheduler.launched_step import TpModelWorker
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent
    from sglang.srt.model_loader.weight_seed import WeightSeed
    from sglang.srt.observability.engine_metrics import SchedulerMetrics
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_IDLE_POLL_MS: Final = 1000
_BUSY_POLL_MS: Final = 1
_PAUSED_POLL_MS: Final = 20
_END: Final = object()
_SHUT_DOWN = abort_reason("the server is shutting down", 503)

_DAMAGED = abort_reason(
    "a page of the cached prefix was damaged while the prompt was read; send the request again", 503
)


class Channel(Protocol):
    """Rank 0's connection to the other processes."""

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        """Messages that are there, after waiting at most `timeout_ms` for the first."""

    def send(self, output: SchedulerOutput) -> None:
        """Pass on one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerResources:
    """Inputs of a scheduler, built by `build_scheduler` or a test. The tree must be on the worker's
    pools."""

    worker: TpModelWorker
    tree: RadixCache
    metrics: SchedulerMetrics
    group: RankGroup = field(default_factory=SingleRank)
    """The ranks; the tree has the same group."""
    new_decoder: DecoderFactory | None = None
    """Makes the decoders that stop strings and patterns need; None: no request may have any."""
    grammar_backend: Callable[[], XGrammarBackend] | None = None
    """Makes the grammar backend when a request first needs it; None: constraints are refused.
    Raises ValueError if the model cannot be constrained."""
    weight_seed: WeightSeed | None = None
    """Gives other servers the addresses of the weights; None: none may read them."""
    make_role: MakeRole | None = None
    """Makes the role of a prefill or decode server; None: the server does both."""
    remake_role: RemakeRole | None = None
    """Makes the transport of the other role; None: the role does not change."""
    publish_events: Callable[[Sequence[KVCacheEvent]], object] | None = None
    """Gets the tree's events of KV blocks after each tick that has some; None: it notes none."""
    overlap: bool = False
    """Prepare each step while the device runs the one before it. It pays if launching a forward
    returns at once."""
    tick_guard: Callable[[], AbstractContextManager[object]] = nullcontext
    """The watchdog's context, entered for a tick and for its message to the other ranks."""
    announce_silence: Callable[[float], None] = lambda seconds: None
    """Tells the other ranks that this one may be silent for so many seconds. Any thread."""


class Scheduler:
    """Continuous batching over one model worker. One thread uses it.

    A tick launches either a prefill batch or a decode step. If both are possible, `BatchPolicy`
    decides, so that neither starves. If `SchedulerResources.overlap`, the tick then processes the
    step of the tick before: the CPU works while the device runs the new step.
    Outputs are the same. A request whose end becomes known only then has run one step too many; the
    token of that step is dropped.
    """

    def __init__(self, server_args: ServerArgs, resources: SchedulerResources) -> None:
        """`server_args` are resolved; no other scheduler uses `resources`."""
        self._resources = resources
        self.state = state = make_state(
            server_args, resources.worker, resources.tree, resources.metrics
        )
        self._outputs = outputs = OutputCollector(
            server_args.stream_interval, resources.tree.held_pages
        )
        self._draft_policy = DraftPolicy(
            resources.worker.num_draft_tokens, always=envs.SGLANG_SPECULATE_ALWAYS.get()
        )
        self._control = ControlHandler(
            state,
            outputs,
            server_args.to_public_dict(),
            self._draft_policy,
            StepProfiler(
                state,
                resources.group.first_rank + resources.group.rank,
                resources.announce_silence,
                lambda: self._role.most_silence_s,
            ),
            resources.weight_seed,
        )
        self._role = Role()
        self._prefill = PrefillScheduler(state, lambda req: self._role.may_compute(req))
        if resources.make_role is not None:
            self._role = resources.make_role(state, self._prefill)
        if resources.remake_role is not None:
            mode = DisaggregationMode(server_args.disaggregation_mode)
            switch = RoleSwitch(mode, self._control, resources.remake_role, self._take_role)
            self._control.handle_by(PDRoleSwitchReqInput, switch.handle)
        stop_checker = StopChecker(resources.new_decoder, resources.group)
        self._results = ResultProcessor(state, stop_checker, outputs, self._role)
        self._grammar = GrammarManager(resources.grammar_backend)
        self._input = InputHandler(
            state, self._control, self._results, outputs, self._grammar, self._role
        )
        self._decode = DecodeScheduler(state, resources.worker.verifies_ahead)
        self._batch_policy = BatchPolicy(server_args.target_inter_token_latency)
        resources.tree.watch_workload(state.workload)
        resources.tree.watch_queues(state.queues)
        # Warm-up is over.
        device_runtime(server_args.device).on_kernel_compiled(resources.metrics.on_kernel_compiled)
        self._last_end = 0.0
        self._did_forward = False
        self._check: Parts | None = None
        """The self check under way."""
        self._is_verified = False
        self._log = RateLimitedLogger(logger)
        self._send: Callable[[SchedulerOutput], None] | None = None
        """Sends the outputs of a step at once; None: they leave with the tick."""
        self.is_stopped = False

    def step(self, tick: Tick) -> list[SchedulerOutput]:
        """One tick: messages in, at most one batch, outputs out."""
        with self._resources.tick_guard():
            state = self.state
            self._check = None  # This step may change the state that was checked.
            state.now = tick.now
            state.counters.ticks += 1
            state.tree.begin_tick(tick.now)
            for message in tick.messages:
                self._input.handle(message)
            if state.hicache is not None:
                state.hicache.check_hicache_events()
                if state.queues.computing and self._damaged():
                    self._settle()
            if self._control.is_draining and self._control.is_drained():
                self._input.abort(None, _SHUT_DOWN)
                self.is_stopped = True
            if tick.grammars:
                self._grammar.apply_results(tick.grammars, state.queues)
            if state.queues.aborted:
                self._settle()
                self._input.end_aborted()
            self._control.tick()
            self._results.follow_transfers(self._role.tick())
            self._did_forward = not self.is_stopped and self._run_batch()
            if self._resources.publish_events is not None and (events := state.tree.take_events()):
                self._resources.publish_events(events)
            if self._did_forward:
                self._is_verified = False
                if not (self._resources.group.rank or self._log.suppresses(logging.INFO, "status")):
                    self._log_status()
            return self._outputs.take()

    def run(self, channel: Channel) -> None:
        """Rank 0's loop: make ticks, send them to the other ranks and step, until a shutdown is
        complete."""
        self._send = channel.send
        while not self.is_stopped:
            timeout = self.poll_timeout_ms()
            messages = channel.receive(timeout)
            # Only an idle server has time to check page ownership.
            is_idle = not messages and (timeout == _IDLE_POLL_MS or self._check is not None)
            if is_idle and not self._is_verified:
                tick = Tick(time.monotonic(), is_idle=True)
            elif is_idle and not self.state.tree.needs_tick:
                continue  # The other ranks wait as this one does.
            else:
                tick = self.make_tick(time.monotonic(), messages)
            if self._resources.group.size > 1:
                with self._resources.tick_guard():
                    self._resources.group.broadcast(encode(tick))
            for output in self._step_or_verify(tick):
                channel.send(output)

    def run_beside(self) -> None:
        """Loop of every other rank: run rank 0's ticks until a shutdown is complete. The outputs
        are dropped, since rank 0 sends them."""
        while not self.is_stopped:
            self._step_or_verify(decode_tick(self._resources.group.broadcast(None)))

    def make_tick(self, now: float, messages: Sequence[ToScheduler] = ()) -> Tick:
        """Rank 0: the next tick, for all ranks to `step`, with the messages since the last one.
        `now` is `time.monotonic()`."""
        state = self.state
        is_full = len(state.queues.waiting) >= state.limits.max_queued_requests
        # No grammar is compiled for requests that are going to be refused.
        coming = () if is_full or self._control.is_draining else messages
        return Tick(now, messages, self._grammar.collect_results(state.queues, coming))

    def _step_or_verify(self, tick: Tick) -> list[SchedulerOutput]:
        if tick.is_idle:
            self._verify_part()
            return []
        return self.step(tick)

    def close(self) -> None:
        """End the threads of the cache, and the grammars' threads and processes."""
        self._control.close()
        self._role.close()
        self._grammar.close()
        self.state.tree.shutdown()

    def _take_role(self, make_role: MakeRole) -> None:
        """Change to another role, while no request is here."""
        before = self._role
        self._role = self._results.role = self._input.role = make_role(self.state, self._prefill)
        before.close()

    def is_idle(self) -> bool:
        """True if no work is left until a message comes."""
        return not (self._control.is_waiting or self._control.busy())

    def poll_timeout_ms(self) -> int:
        """Milliseconds for which the loop may wait for a message."""
        if self._did_forward or self._check is not None:
            return 0
        if self.is_idle():
            return _IDLE_POLL_MS
        return _PAUSED_POLL_MS if self._control.is_paused else _BUSY_POLL_MS

    def _verify_part(self) -> None:
        """Do the next part of the check of page ownership, which no tick has changed since the
        first part. Ranks do equal parts, since their states are equal. A message that comes
        meanwhile ends the check; it begins anew when the server is idle again. Raises as
        `SchedulerState.check_integrity`."""
        if self._check is None:
            self._check = self.state.integrity_parts()
        if next(self._check, _END) is _END:
            self._check, self._is_verified = None, True

    def _run_batch(self) -> bool:
        """Launch a step, and process the step before it, which the device ran meanwhile. False:
        there was no step to launch or process."""
        state = self.state
        was_in_flight = state.in_flight is not None
        launched = None if self._control.is_paused else self._launch()
        if state.limits.decode_tokens > 1:
            self._draft_policy.on_tick(state.now, launched)
        if state.hicache is not None:
            # Issued while the device computes, since issuing copies takes the CPU milliseconds.
            state.hicache.start_writing_host_cache()
        before, state.in_flight = state.in_flight, launched
        if before is not None:
            self._process(before)
        if (launched is not None and not self._resources.overlap) or self._damaged():
            self._settle()
        return launched is not None or was_in_flight

    def _settle(self) -> None:
        """Process the step in flight, after which the state of every request is known."""
        state = self.state
        step, state.in_flight = state.in_flight, None
        if step is not None:
            self._process(step)
        for req in self._damaged():
            if self._role.is_read(req):
                state.queues.abort(req, _DAMAGED)
                continue
            self._log.warning(
                "damaged", "request %s starts again: a page of its prefix was damaged", req.rid
            )
            state.release(req)
            state.queues.redo(req)
            state.counters.redone += 1

    def _damaged(self) -> list[Req]:
        """The requests whose prefix was condemned while their prompt was computed. No other request
        has used what they computed, and none of it has left this tick."""
        computing = self.state.queues.computing
        return [req for req in computing if req.slots.last_node.is_condemned]

    def _process(self, step: LaunchedStep) -> None:
        if step.load != -1:
            self.state.tree.verify_load(step.load)
        before = self.state.counters.decode_tokens
        going_on = sum(req.progress.finish_reason is None for req in step.reqs)
        with explaining_out_of_memory():
            self._results.process(step)
        if self._send is not None:
            # Issuing copies to L2, which comes next, takes up to a millisecond.
            for output in self._outputs.take():
                self._send(output)
        if step.width > 1:
            given = self.state.counters.decode_tokens - before
            self._draft_policy.on_verified(step, given, going_on)
        now = time.monotonic()
        if step.works:
            # The device began it when the step before it ended.
            seconds = now - max(step.launched, self._last_end)
            if (hicache := self.state.hicache) is not None:
                hicache.note_prefill(sum(work.extend_len for work in step.works), seconds)
        self._last_end = now

    def _launch(self) -> LaunchedStep | None:
        """Launch the next step; None: no step can run."""
        state, decoding = self.state, self.state.queues.decoding
        may_prefill = not decoding or (
            self._batch_policy.may_prefill(state.now) and not self._decode.is_stalled
        )
        step = self._launch_prefill() if may_prefill else None
        if step is None and not decoding and state.in_flight is not None:
            # Only the requests of that step can decode. Their first tokens are sent now, because
            # launching a step for their second tokens takes the next tick a millisecond.
            self._settle()
            return None
        return step or self._launch_decode()

    def _launch_prefill(self) -> LaunchedStep | None:
        state = self.state
        partial = state.queues.partial
        if partial is not None and partial.spec.logprob_start_len >= 0:
            self._settle()  # The next part goes on where its logprobs end.
        before = state.in_flight
        if before is not None and before.mostly_done is not None:
            # Otherwise a launch blocks when the driver's queue is full, while it holds the
            # interpreter's lock, and the threads of L3 stand still during long prefills.
            with explaining_out_of_memory():
                before.mostly_done.synchronize()
        scheduled = self._prefill.schedule()
        if scheduled is None:
            return None
        works, load = scheduled
        self._batch_policy.on_prefill(state.now)
        info = state.sampling_info(
            [work.req for work in works], [work.is_last_chunk for work in works]
        )
        batch = make_prefill_batch(works, state.pools, info, load)
        if self._resources.overlap:
            batch.forward.mostly_done = device_runtime(state.pools.device).make_event()
        started = time.monotonic()
        result, _, _ = self._forward(batch)
        self._prefill.on_launched(works)
        return LaunchedStep(
            result=result,
            launched=started,
            works=works,
            mostly_done=batch.forward.mostly_done,
            load=load,
        )

    def _launch_decode(self) -> LaunchedStep | None:
        decoding = self.state.decode_batch
        if not self._prepare_decode():
            return None
        self._batch_policy.on_decode()
        info = self._decode.sampling_info
        assert info is not None, "the step is prepared"
        batch = decoding.worker_batch(info, self.state.snapshots)
        started = time.monotonic()
        result, token_ids, accepted = self._forward(batch)
        if info.penalties is not None:
            info.accumulate(token_ids)
        has_joined = decoding.has_joined
        decoding.advance(token_ids, accepted)
        return LaunchedStep(
            result=result,
            launched=started,
            reqs=list(decoding.reqs),
            width=decoding.width,
            has_joined=has_joined,
        )

    def _forward(
        self, batch: ModelWorkerBatch
    ) -> tuple[StepResult, torch.Tensor, torch.Tensor | None]:
        """Launch a forward.

        Returns:
            Its result, and what is on the device: its tokens, int64 `[bs]`, or of a verification
            `[bs * width]` and the accepted drafts, int64 `[bs]`.
        """
        with explaining_out_of_memory():
            output, token_ids = self._resources.worker.forward_batch_generation(batch)
            return StepResult(output, token_ids), token_ids, output.accepted

    def _prepare_decode(self) -> bool:
        """Prepare slots and sampling of the next decode step. False: none can run.

        Processing the step in flight changes the batch, so everything is decided again after it.
        """
        state, decode, batch = self.state, self._decode, self.state.decode_batch
        while num_ready := decode.gather():
            width = self._decode_width(num_ready) if state.limits.decode_tokens > 1 else 1
            is_same = width == batch.width
            if state.in_flight is not None and not (is_same and decode.can_run_ahead()):
                self._settle()
                continue
            if not is_same:
                batch.change_width(width)
            is_ready = decode.prepare()
            if is_ready or state.in_flight is None:
                return is_ready
            # Requests that end with that step may give back enough slots. If not, some are
            # retracted.
            self._settle()
        return False

    def _decode_width(self, batch_size: int) -> int:
        """Tokens of each request in the next decode step of a model that drafts."""
        return self._draft_policy.width(batch_size)

    def _log_status(self) -> None:
        state = self.state
        if self._log.info(
            "status",
            "running %d, waiting %d, slots %d/%d, prefill tokens %d, decode steps %d; %s",
            state.queues.num_holders,
            len(state.queues.waiting),
            state.used_tokens(),
            state.limits.pool_tokens,
            state.counters.prefill_tokens,
            state.counters.decode_steps,
            state.recent,
        ):
            state.recent = RecentRequests()

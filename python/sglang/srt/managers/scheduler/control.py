"""Handles messages: control requests, new requests, aborts, the shutdown."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX, LONGEST_STORAGE_CHANGE_S
from sglang.srt.distributed.device_communicators.transfer_engines import describe_transfer_engine
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.state import busy_text
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_view import cache_view, verdicts
from sglang.srt.mem_cache.l3.hicache_administration import ChangeResult, StorageAdministration
from sglang.srt.mem_cache.tree.session_hints import Session
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.messages.io_struct import (
    ABORTED_BY_CLIENT,
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    ControlReq,
    ControlReqOutput,
    DeclineRoomReq,
    DetachHiCacheStorageReqInput,
    FinishReason,
    FlushCacheReqInput,
    GetCacheViewReq,
    GetHiCacheStorageReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    GetWeightSeedReq,
    PauseGenerationReqInput,
    RequestOutput,
    SessionReqInput,
    SettleHiCacheStorageReqInput,
    ShutdownReq,
    StartProfileReqInput,
    StopProfileReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
    abort_reason,
)
from sglang.srt.observability.flow_history import FlowHistory

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.draft_policy import DraftPolicy
    from sglang.srt.managers.scheduler.grammar import GrammarManager
    from sglang.srt.managers.scheduler.profiler import StepProfiler
    from sglang.srt.managers.scheduler.results import OutputCollector, ResultProcessor
    from sglang.srt.managers.scheduler.role import Role
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.model_loader.weight_seed import WeightSeed

logger = logging.getLogger(__name__)

_NO_SEED = f"no server may read the weights of this one: start it with {START_SEED}"
_NO_HIERARCHY = "the hierarchical cache is off: start with --enable-hierarchical-cache"


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """A flush or a change of L3 that is not answered yet."""

    req_id: str
    deadline: float
    """`tick.now` seconds."""
    only_asks: bool = False
    """See `FlushCacheReqInput`."""


class ControlHandler:
    """Answers control requests. None of them blocks the loop. `public_args` are the server's
    arguments without its secrets; `drafts` decides which steps verify drafts, and is only read;
    `weight_seed` None: no server may read the weights.

    Attributes:
        is_paused: True if no step may be launched.
    """

    def __init__(
        self,
        state: SchedulerState,
        outputs: OutputCollector,
        public_args: dict[str, Any],
        drafts: DraftPolicy,
        profiler: StepProfiler,
        weight_seed: WeightSeed | None = None,
    ) -> None:
        self._state = state
        self._outputs = outputs
        self._public_args = public_args
        self._drafts = drafts
        self._weight_seed = weight_seed
        self._flushes: list[_Pending] = []
        self._change: _Pending | None = None
        self._drain_deadline: float | None = None
        self.is_paused = False
        self._profiler = profiler
        self._history = FlowHistory(self._sample)
        detach, clear = StorageAdministration.begin_detaching, StorageAdministration.begin_clearing
        self._handlers: dict[type, Callable[[Any], dict[str, Any] | None]] = {
            FlushCacheReqInput: self._flush,
            GetInternalStateReq: self._internal_state,
            GetMetricsReq: self._metrics,
            GetCacheViewReq: self._view,
            GetWeightSeedReq: self._describe_seed,
            SessionReqInput: self._note_session,
            PauseGenerationReqInput: self._pause,
            ContinueGenerationReqInput: self._continue,
            StartProfileReqInput: self._profiler.start,
            StopProfileReqInput: self._profiler.stop,
            AttachHiCacheStorageReqInput: self._attach,
            SettleHiCacheStorageReqInput: self._settle,
            DetachHiCacheStorageReqInput: lambda one: self._begin_change(one.req_id, detach),
            ClearHiCacheReqInput: lambda one: self._begin_change(one.req_id, clear),
            GetHiCacheStorageReqInput: self._get_storage,
        }
        """Each returns the data of its answer; None: the answer comes later. They raise ValueError
        with the reason of a refusal."""

    def handle_by(self, kind: type, handler: Callable[[Any], dict[str, Any] | None]) -> None:
        """Let `handler` handle messages of `kind`, as `_handlers`."""
        self._handlers[kind] = handler

    def note_role(self, mode: str) -> None:
        """The server has changed its role."""
        self._public_args["disaggregation_mode"] = mode

    def handle(self, message: object) -> None:
        if isinstance(message, ShutdownReq):
            self._drain_deadline = self._state.now + max(0.0, message.timeout)
            self.is_paused = False  # Requests under way may end well.
            logger.info("shutting down within %.1f s: %s", message.timeout, self.busy() or "idle")
            return
        assert isinstance(message, ControlReq), "every other message is a request's"
        try:
            data = self._handlers[type(message)](message)
        except ValueError as error:
            self._answer(message.req_id, False, str(error))
        else:
            if data is not None:
                self._answer(message.req_id, True, data=data)

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    @property
    def is_waiting(self) -> bool:
        """True if a flush or a shutdown waits for idleness or a deadline."""
        return bool(self._flushes) or self.is_draining

    def is_drained(self) -> bool:
        """While it drains: true if all work is done, or the time for it is up."""
        assert self._drain_deadline is not None
        return not self.busy() or self._state.now >= self._drain_deadline

    def busy(self) -> dict[str, int]:
        """Counts of work that is not done; empty when idle."""
        state = self._state
        counts = {
            "running": state.queues.num_holders,
            "waiting": len(state.queues.waiting),
            "steps in flight": int(state.in_flight is not None),
        }
        if state.hicache is not None:
            counts.update(state.hicache.is_busy())
        return {kind: count for kind, count in counts.items() if count}

    def tick(self) -> None:
        """Answer a change of L3 that has ended. Run the pending flushes if the scheduler is idle,
        and refuse those that have waited too long. Sample the counts."""
        self._history.on_tick(self._state.now)
        if self._profiler.is_running:
            self._profiler.tick()
        if self._change is not None:
            self._end_change(self._change)
        if not self._flushes:
            return
        busy = self.busy()
        if not busy and not all(flush.only_asks for flush in self._flushes):
            self.flush_now()
        still: list[_Pending] = []
        for flush in self._flushes:
            if not busy:
                self._answer(
                    flush.req_id, True, "idle" if flush.only_asks else "L1 and L2 are empty"
                )
            elif self._state.now >= flush.deadline:
                self._answer(flush.req_id, False, busy_text(busy))
            else:
                still.append(flush)
        self._flushes = still

    def _sample(self) -> dict[str, int]:
        """The counts of the history. An unattended server looks after its store then, too."""
        self._state.tree.watch_store()
        return self._state.token_counts()

    def close(self) -> None:
        """End a profile under way."""
        self._profiler.close()

    def flush_now(self) -> None:
        """Empty L1 and L2. No request may run, and no copy be in flight."""
        state = self._state
        assert not self.busy(), "flushed while busy"
        state.tree.reset()
        state.pools.allocator.clear()
        state.pools.req_to_token_pool.clear()
        logger.info("flushed L1 and L2")

    def _flush(self, message: FlushCacheReqInput) -> None:
        deadline = self._state.now + max(0.0, message.timeout)
        self._flushes.append(_Pending(message.req_id, deadline, message.only_asks))

    def _internal_state(self, message: GetInternalStateReq) -> dict[str, Any]:
        state = self._state
        tree = state.tree
        return {
            "server_args": self._public_args,
            "num_running_reqs": state.queues.num_holders,
            "num_waiting_reqs": len(state.queues.waiting),
            "max_total_num_tokens": state.limits.pool_tokens,
            "max_running_requests": state.limits.max_running_requests,
            "max_req_input_len": state.limits.max_input_tokens,
            "free_tokens": state.pools.allocator.available_size(),
            "evictable_tokens": tree.evictable_size(),
            "used_tokens": state.used_tokens(),
            **tree.mamba_slots(),
            "new_token_ratio": state.estimate.ratio,
            "busy": self.busy(),
            "is_paused": self.is_paused,
            "counters": dataclasses.asdict(state.counters),
            "tiers": tree.tiers(),
            "hicache": {"enabled": state.hicache is not None, **tree.storage_state()},
            "transfer_engine": describe_transfer_engine(),
        }

    def _metrics(self, message: GetMetricsReq) -> dict[str, Any]:
        state = self._state
        state.tree.read_metrics()
        return {"text": state.metrics.render(state.load())}

    def _view(self, message: GetCacheViewReq) -> dict[str, Any]:
        state = self._state
        queues = {"running": state.queues.num_holders, "waiting": len(state.queues.waiting)}
        history = self._history.latest(state.now)
        return {
            "model_name": self._public_args["served_model_name"],
            **cache_view(state.tree),
            "queues": {**queues, **state.tree.is_busy()},
            "speculation": self._speculation(),
            "history": history,
            "verdicts": verdicts(history, state.limits.pool_tokens),
        }

    def _speculation(self) -> dict[str, Any] | None:
        """The policy of drafts, and verifications by the tier of the prompt's prefix; None: none
        are drafted."""
        policy = self._drafts.describe()
        if policy is None:
            return None
        tiers = self._state.metrics.verifications
        return {
            **policy,
            "tiers": {tier: msgspec.structs.asdict(one) for tier, one in tiers.items()},
        }

    def _describe_seed(self, message: GetWeightSeedReq) -> dict[str, Any]:
        if self._weight_seed is None:
            raise ValueError(_NO_SEED)
        return self._weight_seed.answer(message.rank)

    def _note_session(self, message: SessionReqInput) -> dict[str, Any]:
        tree, session = self._state.tree, Session.of(message.extra_key, message.session_id)
        if message.is_closed:
            tree.close_session(session)
        else:
            tree.renew_session(session)
        return {}

    def _pause(self, message: PauseGenerationReqInput) -> dict[str, Any]:
        if self.is_draining:
            raise ValueError("the server is shutting down")
        if not self.is_paused:
            logger.info("generation is paused: %s", self.busy() or "idle")
        self.is_paused = True
        return {}

    def _continue(self, message: ContinueGenerationReqInput) -> dict[str, Any]:
        if self.is_paused:
            logger.info("generation continues: %s", self.busy() or "idle")
        self.is_paused = False
        return {}

    def _attach(self, message: AttachHiCacheStorageReqInput) -> None:
        self._begin_change(
            message.req_id,
            lambda administration: administration.begin_attaching(
                message.hicache_storage_backend,
                message.hicache_storage_backend_extra_config_json,
                message.hicache_storage_prefetch_policy,
                message.hicache_write_policy,
                only_prepares=message.only_prepares,
            ),
        )

    def _settle(self, message: SettleHiCacheStorageReqInput) -> None:
        self._answer_change(message.req_id, self._administration().settle(keeps=message.keeps))

    def _answer_change(self, req_id: str, result: ChangeResult) -> None:
        logger.info("administration of L3: %s", result.message)
        data = self._state.tree.storage_state() if result.done else None
        self._answer(req_id, result.done, result.message, data)

    def _get_storage(self, message: GetHiCacheStorageReqInput) -> dict[str, Any]:
        self._administration()
        return self._state.tree.storage_state()

    def _administration(self) -> StorageAdministration:
        """Changes of L3 at run time. Raises ValueError: the cache has no tiers below L1."""
        if self._state.hicache is None:
            raise ValueError(_NO_HIERARCHY)
        return self._state.hicache.administration

    def _begin_change(self, req_id: str, begin: Callable[[StorageAdministration], None]) -> None:
        """Begin a change of L3 on an idle hierarchical cache. A ValueError has the reason why it
        cannot begin."""
        administration = self._administration()
        if busy := self.busy():
            raise ValueError(busy_text(busy))
        begin(administration)
        self._change = _Pending(req_id, self._state.now + LONGEST_STORAGE_CHANGE_S)

    def _end_change(self, change: _Pending) -> None:
        """Answer the change of L3 under way if it has ended, or has taken too long."""
        administration = self._administration()
        if self.is_draining:
            administration.give_up("the server is shutting down")
        elif self._state.now >= change.deadline:
            administration.give_up(f"it has taken {LONGEST_STORAGE_CHANGE_S:.0f} s; see the log")
        if (result := administration.take_result()) is None:
            return
        self._change = None
        self._answer_change(change.req_id, result)

    def _answer(
        self, req_id: str, success: bool, message: str = "", data: dict[str, Any] | None = None
    ) -> None:
        self._outputs.answer(
            ControlReqOutput(req_id=req_id, success=success, message=message, data=data or {})
        )


class InputHandler:
    """Accepts and refuses requests, and ends aborted ones. `role` may change while no request is
    here."""

    def __init__(
        self,
        state: SchedulerState,
        control: ControlHandler,
        results: ResultProcessor,
        outputs: OutputCollector,
        grammar: GrammarManager,
        role: Role,
    ) -> None:
        self._state = state
        self._control = control
        self._results = results
        self._outputs = outputs
        self._grammar = grammar
        self.role = role
        self._num_arrivals = 0

    def handle(self, message: ToScheduler) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            self._arrive(message)
        elif isinstance(message, DeclineRoomReq):
            self.role.on_declined(message.bootstrap, message.reason)
        elif isinstance(message, AbortReq):
            self.abort(None if message.abort_all else message.rid, ABORTED_BY_CLIENT)
        else:
            self._control.handle(message)

    def abort(self, rid: str | None, reason: FinishReason) -> None:
        """Mark request `rid` (None: every one) to end before the next step. An unknown id is
        ignored: the request may have ended while the message was on its way."""
        queues = self._state.queues
        if rid is None:
            for req in queues.alive:
                queues.abort(req, reason)
        elif (found := queues.find(rid)) is not None:
            queues.abort(found, reason)

    def end_aborted(self) -> None:
        """End the marked requests, in any state. No step may be in flight."""
        for req in list(self._state.queues.aborted):
            assert req.progress.to_abort is not None
            self._results.end(req, req.progress.to_abort)

    def _arrive(self, message: TokenizedGenerateReqInput) -> None:
        if self._state.queues.find(message.rid) is not None:
            # The server refuses used ids. An answer would end the stream of the request that has
            # the id.
            logger.error("dropped a request: rid %s is in use", message.rid)
            return
        refusal = self._refusal_of(message)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        req = Req.of(
            message,
            arrival_number=self._num_arrivals,
            max_request_tokens=self._state.limits.max_request_tokens,
            eos_token_ids=self._state.eos_token_ids,
        )
        refusal = self.role.on_arrival(req) or self._grammar.on_arrival(req)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        self._num_arrivals += 1
        self._state.queues.arrive(req)
        has_tiers = self._state.hicache is not None
        if not req.is_probe and (has_tiers or not req.is_computed_elsewhere):
            self._look_ahead(req)

    def _refuse(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        self.role.on_refusal(message, reason)
        output = RequestOutput(
            rid=message.rid,
            output_ids=[],
            finish_reason=reason,
            prompt_tokens=len(message.input_ids),
        )
        self._outputs.refuse(output)
        self._state.counters.aborted += 1

    def _refusal_of(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        """Reason why a request cannot be accepted, or None."""
        limits = self._state.limits
        if self._control.is_draining:
            return abort_reason("the server is shutting down", 503)
        full = len(self._state.queues.waiting) >= limits.max_queued_requests
        if full and not message.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return abort_reason(
                f"the request queue is full: --max-queued-requests {limits.max_queued_requests} "
                "wait already; try again later",
                503,
            )
        num_input = len(message.input_ids)
        if num_input == 0:
            return abort_reason("input_ids is empty: give at least one token", 400)
        if num_input > limits.max_input_tokens:
            return abort_reason(
                f"the prompt has {num_input} tokens, at most {limits.max_input_tokens} can ever "
                f"fit (context {limits.context_len}, device pool {limits.pool_tokens} tokens): "
                "send a shorter prompt",
                400,
            )
        return None

    def _look_ahead(self, req: Req) -> None:
        """While the request waits, keep its cached pages in L1 and L2, and read missing ones from
        L3. A sample shares the pages that are read for the request that computes its prompt."""
        tree, queues = self._state.tree, self._state.queues
        key = req.match_key()
        began = time.monotonic()
        needs_state = not req.is_computed_elsewhere
        match = tree.match_prefix(MatchPrefixParams(key, req=req.slots, needs_state=needs_state))
        ended = time.monotonic()
        req.report.match_s = ended - began
        known = match.device_indices.numel() + match.host_hit_length
        req.progress.cached_on_arrival = known
        if req.spec.return_cache_report or req.spec.is_traced:
            report = CacheReport(on_arrival=known, spans=[] if req.spec.is_traced else None)
            report.add_span("match", began, ended, known)
            req.report.cache = report
        tree.note_waiting(req.rid, req.arrival_number, match.last_host_node)
        if self._state.hicache is not None:
            self._state.hicache.prefetch_from_storage(
                req.rid,
                match.last_host_node,
                key.token_ids[known:],
                extra_key=req.spec.extra_key,
                only_join=queues.is_prompt_ahead(req.spec.sample_of),
                report=req.report.cache,
            )

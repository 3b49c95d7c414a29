"""Applies the results of a step to its requests, and collects the outputs that leave the tick."""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    FinishReason,
    RequestOutput,
    SchedulerOutput,
    Verifications,
    abort_reason,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep, StepResult
    from sglang.srt.managers.scheduler.requests.stop import StopChecker
    from sglang.srt.managers.scheduler.role import Role, TransferUpdate
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.mem_cache.tree.held_pages import HeldPages
    from sglang.srt.messages.first_token import FirstToken


logger = logging.getLogger(__name__)


class OutputCollector:
    """Collects the messages that leave at the end of a tick.

    A request that streams has an output for its first token, then one whenever at least
    `stream_interval` tokens are new, and one at its end. Any other request has one at its end.
    `held_pages` are the notes to report from; None: nobody wants reports.
    """

    def __init__(self, stream_interval: int, held_pages: HeldPages | None = None) -> None:
        self._stream_interval = stream_interval
        self._held_pages = held_pages
        self._outputs: list[RequestOutput] = []
        self._answers: list[ControlReqOutput] = []

    def on_tokens(self, req: Req) -> None:
        """`req` has new tokens, or has ended."""
        if req.progress.finish_reason is None:
            if not req.spec.stream:
                return
            num_sent = req.report.num_sent
            if num_sent and len(req.progress.output_ids) - num_sent < self._stream_interval:
                return
        self._outputs.append(_take_new(req))

    def refuse(self, output: RequestOutput) -> None:
        """Add the only output of a request that was never accepted."""
        self._outputs.append(output)

    def answer(self, answer: ControlReqOutput) -> None:
        self._answers.append(answer)

    def take(self) -> list[SchedulerOutput]:
        """Take the messages collected since the last call. A report comes first, so that the server
        knows the pages of a request that it sees end; then tokens."""
        taken: list[SchedulerOutput] = []
        if self._held_pages is not None and (report := self._held_pages.take()) is not None:
            taken.append(report)
        if self._outputs:
            taken.append(BatchTokenIDOutput(outputs=self._outputs))
            self._outputs = []
        if self._answers:
            taken.extend(self._answers)
            self._answers = []
        return taken


def _take_new(req: Req) -> RequestOutput:
    """Take the part of the output of `req` that was not sent yet."""
    spec, progress, report = req.spec, req.progress, req.report
    begin = report.num_sent
    report.num_sent = num_output = len(progress.output_ids)
    wants_tops = spec.return_logprob and spec.top_logprobs_num
    is_first = begin == 0 and spec.logprob_start_len >= 0
    return RequestOutput(
        rid=spec.rid,
        output_ids=progress.output_ids[begin:],
        finish_reason=progress.finish_reason,
        prompt_tokens=len(spec.input_ids),
        completion_tokens=num_output,
        cached_tokens_details=report.cached_tokens_details,
        output_logprobs=progress.output_logprobs[begin:] if spec.return_logprob else None,
        output_top_logprobs=progress.output_top_logprobs[begin:] if wants_tops else None,
        input_logprobs=progress.input_logprobs if is_first else None,
        input_top_logprobs=progress.input_top_logprobs if is_first else None,
        queue_time=report.queue_time,
        stages=None if progress.finish_reason is None else report.stages,
        verifications=copy.copy(report.verifications),
        cache_report=(
            report.cache if progress.finish_reason is not None and report.was_scheduled else None
        ),
        skip_special_tokens=spec.sampling_params.skip_special_tokens,
        shown_chars=(
            None
            if progress.stop_finder is None
            else progress.stop_finder.shown_chars(ended=progress.finish_reason is not None)
        ),
    )


_DEAD_END = abort_reason(
    "no token of this model's vocabulary continues the output as the constraint demands", 400
)


class ResultProcessor:
    """Updates requests after the forward of their batch. `role` may change while no request is
    here."""

    def __init__(
        self,
        state: SchedulerState,
        stop_checker: StopChecker,
        outputs: OutputCollector,
        role: Role,
    ) -> None:
        self._state = state
        self._stop_checker = stop_checker
        self._outputs = outputs
        self.role = role

    def process(self, step: LaunchedStep) -> None:
        """Wait for the end of `step`, and give its requests their results."""
        step.result.wait()
        if step.works:
            self._on_prefill(step)
        elif step.width > 1:
            self._on_verified(step)
        else:
            self._on_decode(step)

    def _on_prefill(self, step: LaunchedStep) -> None:
        """Let requests with complete prompts decode, here or on another server."""
        state, works, result, now = self._state, step.works, step.result, time.monotonic()
        complete: list[Req] = []
        kept: list[Req] = []
        for row, work in enumerate(works):
            req = work.req
            if req.slots.last_node.is_condemned:
                continue  # The prefix was damaged: `Scheduler` starts the request again.
            state.counters.prefill_tokens += work.extend_len
            if result.input_logprobs is not None:
                req.progress.input_logprobs += result.input_logprobs.values[row]
                req.progress.input_top_logprobs += result.input_logprobs.tops[row]
            if req.report.cache is not None:
                req.report.cache.add_span("prefill", step.launched, now, work.extend_len)
            self.role.on_computed(work)
            if work.is_last_chunk:
                self._append(req, row, result)
                self._end_prefill(req)
                (kept if req.decodes_elsewhere else complete).append(req)
        for req in self._end_or_output(complete):
            state.queues.join(req)
        for req, reason in zip(kept, self._stop_checker.check(kept), strict=True):
            self.role.hand_over(req, reason)
            state.queues.hold(req)
        state.counters.prefill_batches += 1

    def _on_decode(self, step: LaunchedStep) -> None:
        snapshots = self._state.snapshots
        alive: list[Req] = []
        for row, req in enumerate(step.reqs):
            progress = req.progress
            if progress.finish_reason is not None:
                continue  # The request ended while this step was in flight.
            progress.num_in_flight -= 1
            progress.kv_committed_len += 1
            if snapshots is not None:
                snapshots.on_counted(req)
            self._append(req, row, step.result)
            alive.append(req)
        if step.has_joined:
            self._observe_first_decode(alive)
        self._end_or_output(alive)
        self._state.counters.decode_tokens += len(alive)
        self._state.counters.decode_steps += 1

    def _on_verified(self, step: LaunchedStep) -> None:
        """Each request gets the tokens up to the one after its last accepted draft. One that ends
        at an earlier token drops the others."""
        result, width, snapshots = step.result, step.width, self._state.snapshots
        # Others ended while this step was in flight.
        going_on = [
            (row, req) for row, req in enumerate(step.reqs) if req.progress.finish_reason is None
        ]
        for nth in range(width):
            newest = {req: row for row, req in going_on if nth <= result.accepted[row]}
            for req, row in newest.items():
                req.progress.num_in_flight -= 1
                req.progress.kv_committed_len += 1
                if snapshots is not None:
                    snapshots.on_counted(req)
                self._append(req, row * width + nth, result)
                self._count_verified(req, is_draft=nth > 0)
            if nth == 0 and step.has_joined:
                self._observe_first_decode(list(newest))
            self._state.counters.decode_tokens += len(newest)
            still = set(self._end_finished(list(newest)))
            going_on = [(row, req) for row, req in going_on if req not in newest or req in still]
        for row, req in going_on:
            self._outputs.on_tokens(req)
            self._state.trim(req, width - 1 - result.accepted[row])
        self._state.counters.decode_steps += 1

    def _count_verified(self, req: Req, *, is_draft: bool) -> None:
        """Count a token that a verification gave; the first is not a draft."""
        report, state = req.report, self._state
        if report.verifications is None:
            report.verifications = Verifications()
        figures = [report.verifications]
        if not req.is_probe:
            tier = report.cached_tokens_details.lowest_tier
            figures += [state.metrics.verifications[tier], state.recent.verifications]
        for one in figures:
            if is_draft:
                one.accepted += 1
            else:
                one.count += 1

    def _end_prefill(self, req: Req) -> None:
        """Note the first token of `req`, or a later one if its prompt was computed again."""
        now, report = time.monotonic(), req.report
        if report.stages.prefill is not None:
            return
        report.stages.prefill, report.stage_began = now - report.stage_began, now
        if not req.is_probe:
            self._state.metrics.observe_stage("prefill", report.stages.prefill)
            self._state.recent.on_first_token(req, now)

    def _observe_first_decode(self, reqs: list[Req]) -> None:
        """Record how long each of `reqs` that has two tokens waited for the second."""
        now = time.monotonic()
        for req in reqs:
            if len(req.progress.output_ids) == 2 and not req.is_probe:
                self._state.metrics.observe_stage("first_decode", now - req.report.stage_began)

    def follow_transfers(self, update: TransferUpdate) -> None:
        """Take back slots, end the requests whose transfer is done or has failed, and let requests
        decode whose prompt has arrived."""
        for req in update.released:
            self._state.release(req)
            self._state.queues.let_go(req)
        for req, reason in update.ended:
            self.end(req, reason)
        for req, first in update.received:
            self._receive(req, first)

    def _receive(self, req: Req, first: FirstToken) -> None:
        spec, progress = req.spec, req.progress
        progress.kv_committed_len, progress.num_in_flight = progress.num_tokens, 0
        req.report.stage_began = now = time.monotonic()
        self._state.recent.on_first_token(req, now)
        if first.cached is not None:
            req.report.cached_tokens_details = first.cached
        if spec.return_cache_report:
            req.report.cache = first.cache_report
        self._state.tree.cache_unfinished_req(req.slots, chunked=False)
        if first.token_id is not None:
            self._append_token(req, first.token_id)
            if spec.return_logprob:
                progress.output_logprobs.append(first.logprob or 0.0)
                if spec.top_logprobs_num:
                    progress.output_top_logprobs.append(first.top_logprobs or [])
        for going_on in self._end_or_output([req]):
            if going_on.slots.last_node.is_condemned:
                self._compute_here(going_on)
            else:
                self._state.queues.join(going_on)

    def _compute_here(self, req: Req) -> None:
        """Let the next steps compute a prompt that has come, because a page of its prefix was
        damaged in L2. The prefill server has let go of its pages already."""
        logger.warning("request %s is computed here: a page of its prefix was damaged", req.rid)
        self._state.release(req)
        self._state.queues.retract(req)
        self._state.counters.redone += 1

    def end(self, req: Req, reason: FinishReason) -> None:
        """End `req`, in any state. Slots that a transfer still uses come back later."""
        state, report = self._state, req.report
        if reason.type == "abort":
            state.tree.release_aborted_request(req.rid)
            state.counters.aborted += 1
        else:
            state.counters.finished += 1
        if report.stages.prefill is not None:
            seconds = time.monotonic() - report.stage_began
            if req.decodes_elsewhere:
                report.stages.transfer = seconds
            elif req.progress.output_ids:
                report.stages.decode = seconds
        is_untouched = self.role.on_end(req, reason)
        state.queues.finish(req, reason, lingers=not is_untouched)
        if is_untouched and req.slots.req_pool_idx is not None:
            state.release(req)
        self._outputs.on_tokens(req)

    def _append(self, req: Req, row: int, result: StepResult) -> None:
        spec, progress = req.spec, req.progress
        if spec.sampling_params.max_new_tokens == 0:
            return
        self._append_token(req, result.token_ids[row])
        if spec.return_logprob:
            progress.output_logprobs.append(result.logprob(row))
            if spec.top_logprobs_num:
                tops = result.top_logprobs(row, spec.top_logprobs_num)
                progress.output_top_logprobs.append(tops)

    def _append_token(self, req: Req, token: int) -> None:
        progress = req.progress
        progress.output_ids.append(token)
        if progress.matcher is not None and not progress.matcher.accept_token(token):
            # No token of the vocabulary continues the grammar.
            self._state.queues.abort(req, _DEAD_END)
        if not req.is_probe:
            self._state.metrics.num_generated += 1

    def _end_or_output(self, reqs: list[Req]) -> list[Req]:
        """End the requests that their newest token ends. Output the token of the others, and return
        them."""
        going_on = self._end_finished(reqs)
        for req in going_on:
            self._outputs.on_tokens(req)
        return going_on

    def _end_finished(self, reqs: list[Req]) -> list[Req]:
        """End the requests that their newest token ends, and return the others."""
        going_on: list[Req] = []
        for req, reason in zip(reqs, self._stop_checker.check(reqs), strict=True):
            if reason is not None:
                self.end(req, reason)
                continue
            going_on.append(req)
        return going_on

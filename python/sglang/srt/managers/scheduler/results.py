"""Gives the results of a step to its requests: tokens, logprobs, and whether they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.batch import PrefillWork
from sglang.srt.managers.scheduler.requests.req import Req

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep, StepResult
    from sglang.srt.managers.scheduler.output import OutputCollector
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.managers.scheduler.stop import StopChecker

_DEAD_END = FinishReason(
    type="abort",
    message="no token of this model's vocabulary continues what the constraint asks for",
    status_code=400,
)


class ResultProcessor:
    """Moves requests on after the forward of their batch."""

    def __init__(
        self, state: SchedulerState, stop_checker: StopChecker, outputs: OutputCollector
    ) -> None:
        self._state = state
        self._stop_checker = stop_checker
        self._outputs = outputs

    def process(self, step: LaunchedStep) -> None:
        """Wait for the end of `step`, and give its requests their results."""
        step.result.wait()
        if step.is_prefill:
            self._on_prefill(step.works, step.result)
        else:
            self._on_decode(step.reqs, step.result)

    def _on_prefill(self, works: list[PrefillWork], result: StepResult) -> None:
        """Requests whose prompts are complete decode from now on."""
        state = self._state
        complete: list[Req] = []
        for row, work in enumerate(works):
            req = work.req
            state.counters.prefill_tokens += work.extend_len
            if result.input_logprobs is not None:
                req.progress.input_logprobs += result.input_logprobs.values[row]
                req.progress.input_top_logprobs += result.input_logprobs.tops[row]
            if work.is_last_chunk:
                self._append(req, row, result)
                complete.append(req)
        for req in self._end_finished(complete):
            state.queues.join(req)
        state.counters.prefill_batches += 1

    def _on_decode(self, reqs: list[Req], result: StepResult) -> None:
        alive: list[Req] = []
        for row, req in enumerate(reqs):
            progress = req.progress
            progress.num_in_flight -= 1
            if progress.finish_reason is not None:
                continue  # It ended while this step was in flight.
            progress.kv_committed_len += 1
            self._state.snapshots.on_decoded(req)
            self._append(req, row, result)
            alive.append(req)
        self._end_finished(alive)
        self._state.counters.decode_tokens += len(alive)
        self._state.counters.decode_steps += 1

    def end(self, req: Req, reason: FinishReason) -> None:
        """`req` ends now, in whatever state it is."""
        state = self._state
        state.queues.finish(req, reason)
        if req.slots.req_pool_idx is not None:
            state.release(req)
        self._outputs.on_tokens(req)
        if reason.type == "abort":
            state.counters.aborted += 1
        else:
            state.counters.finished += 1

    def _append(self, req: Req, row: int, result: StepResult) -> None:
        spec, progress = req.spec, req.progress
        if spec.sampling_params.max_new_tokens == 0:
            return
        token = result.token_ids[row]
        progress.output_ids.append(token)
        if progress.matcher is not None and not progress.matcher.accept_token(token):
            # Nothing in the vocabulary fits what the grammar wants next.
            self._state.queues.abort(req, _DEAD_END)
        if not spec.is_probe:
            self._state.metrics.num_generated += 1
        if spec.return_logprob:
            progress.output_logprobs.append(result.logprob(row))
            if spec.top_logprobs_num:
                tops = result.top_logprobs(row, spec.top_logprobs_num)
                progress.output_top_logprobs.append(tops)

    def _end_finished(self, reqs: list[Req]) -> list[Req]:
        """End those of `reqs` that their newest token ends, and output it for the others, which are
        returned."""
        going_on: list[Req] = []
        for req, reason in zip(reqs, self._stop_checker.check(reqs), strict=True):
            if reason is not None:
                self.end(req, reason)
                continue
            self._outputs.on_tokens(req)
            going_on.append(req)
        return going_on

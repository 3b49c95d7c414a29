"""Takes a step's results in: tokens to their requests, prompts to the tree, the finished out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.batch import PrefillWork
from sglang.srt.managers.scheduler.batch_pools import release_slots
from sglang.srt.managers.scheduler.req import Req

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
    """What happens to the requests of a batch after its forward."""

    def __init__(
        self, state: SchedulerState, stop_checker: StopChecker, outputs: OutputCollector
    ) -> None:
        self._state = state
        self._stop_checker = stop_checker
        self._outputs = outputs

    def take_in(self, step: LaunchedStep) -> None:
        """Wait for the end of `step`, and give its requests what came of it."""
        step.result.wait()
        if step.is_prefill:
            self._on_prefill(step.works, step.result)
        else:
            self._on_decode(step.reqs, step.result)

    def _on_prefill(self, works: list[PrefillWork], result: StepResult) -> None:
        """Complete prompts decode from now on."""
        state = self._state
        complete: list[Req] = []
        for row, work in enumerate(works):
            req = work.req
            state.counters.prefill_tokens += work.extend_len
            if result.input_logprobs is not None:
                req.input_logprobs += result.input_logprobs.values[row]
                req.input_top_logprobs += result.input_logprobs.tops[row]
            if work.is_last_chunk:
                self._append(req, row, result)
                complete.append(req)
        state.decoding.add(self._end_finished(complete))
        state.counters.prefill_batches += 1

    def _on_decode(self, reqs: list[Req], result: StepResult) -> None:
        state = self._state
        alive: list[Req] = []
        for row, req in enumerate(reqs):
            req.num_in_flight -= 1
            if req.finish_reason is not None:
                continue  # it ended while this step was on its way
            req.kv_committed_len += 1
            self._append(req, row, result)
            alive.append(req)
            state.counters.decode_tokens += 1
        self._end_finished(alive)
        state.counters.decode_steps += 1
        state.decoding.keep([req for req in state.decoding.reqs if req.finish_reason is None])

    def end(self, req: Req, reason: FinishReason) -> None:
        """`req` ends now, wherever it is; neither `chunked` nor `decoding` has it any more."""
        state = self._state
        state.queues.end(req)
        req.finish_reason = reason
        if req.req_pool_idx is not None:
            release_slots(req, state.tree, state.pools)
        self._outputs.on_tokens(req)
        if reason.type == "abort":
            state.counters.aborted += 1
        else:
            state.counters.finished += 1

    def _append(self, req: Req, row: int, result: StepResult) -> None:
        if req.sampling_params.max_new_tokens == 0:
            return
        token = result.token_ids[row]
        req.output_ids.append(token)
        if req.matcher is not None and not req.matcher.accept_token(token):
            # Nothing in the vocabulary fits what the grammar wants next.
            self._state.queues.abort(req, _DEAD_END)
        if not req.is_probe:
            self._state.metrics.num_generated += 1
        if req.return_logprob:
            req.output_logprobs.append(result.logprob(row))
            if req.top_logprobs_num:
                req.output_top_logprobs.append(result.top_logprobs(row, req.top_logprobs_num))

    def _end_finished(self, reqs: list[Req]) -> list[Req]:
        """Give out the newest token of each of `reqs`; those that it does not end."""
        going_on: list[Req] = []
        for req, reason in zip(reqs, self._stop_checker.check(reqs), strict=True):
            if reason is not None:
                self.end(req, reason)
                continue
            self._outputs.on_tokens(req)
            going_on.append(req)
        return going_on

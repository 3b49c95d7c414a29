"""Takes a step's results in: tokens to their requests, prompts to the tree, the finished out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.schedule_batch import PrefillWork, Req, release_slots

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.managers.scheduler_output import OutputCollector
    from sglang.srt.managers.scheduler_state import SchedulerState
    from sglang.srt.managers.scheduler_stop import StopChecker

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

    def on_prefill(
        self,
        works: list[PrefillWork],
        logits_output: LogitsProcessorOutput,
        next_token_ids: torch.Tensor,
    ) -> None:
        """A prefill batch is done; its complete prompts decode from now on."""
        state = self._state
        tokens = next_token_ids.tolist()
        logprobs = _Logprobs(logits_output)
        joined: list[Req] = []
        for row, work in enumerate(works):
            req = work.req
            is_last = work.is_last_chunk
            req.kv_committed_len += work.extend_len
            state.counters.prefill_tokens += work.extend_len
            if logits_output.input_logprobs is not None:
                req.input_logprobs += logits_output.input_logprobs.values[row]
                req.input_top_logprobs += logits_output.input_logprobs.tops[row]
            if is_last:
                self._append(req, tokens[row], row, logprobs)
                if self._end_if_finished(req):
                    continue
                joined.append(req)
            if not req.is_probe:
                state.tree.cache_unfinished_req(req, chunked=not is_last)
        state.decoding.add(joined)
        state.counters.prefill_batches += 1

    def on_decode(
        self,
        sampling_info: SamplingBatchInfo,
        logits_output: LogitsProcessorOutput,
        next_token_ids: torch.Tensor,
    ) -> None:
        """A decode step is done."""
        state = self._state
        batch = state.decoding
        sampling_info.accumulate(next_token_ids)
        batch.advance(next_token_ids)
        logprobs = _Logprobs(logits_output)
        going_on: list[Req] = []
        for row, (req, token) in enumerate(zip(batch.reqs, next_token_ids.tolist(), strict=True)):
            req.kv_committed_len += 1
            self._append(req, token, row, logprobs)
            if not self._end_if_finished(req):
                going_on.append(req)
        state.counters.decode_steps += 1
        state.counters.decode_tokens += len(batch)
        batch.keep(going_on)

    def end(self, req: Req, reason: FinishReason) -> None:
        """`req` ends now, wherever it is; it is in none of the queues any more."""
        state = self._state
        req.finish_reason = reason
        if req.req_pool_idx is not None:
            release_slots(req, state.tree, state.pools.req_to_token_pool)
        self._outputs.on_tokens(req)
        if reason.type == "abort":
            state.counters.aborted += 1
        else:
            state.counters.finished += 1

    def _append(self, req: Req, token: int, row: int, logprobs: _Logprobs) -> None:
        req.output_ids.append(token)
        if req.matcher is not None and not req.matcher.accept_token(token):
            # Nothing in the vocabulary fits what the grammar wants next.
            req.to_abort = req.to_abort or _DEAD_END
        if not req.is_probe:
            self._state.metrics.num_generated += 1
        if req.return_logprob:
            logprobs.append_to(req, row)

    def _end_if_finished(self, req: Req) -> bool:
        reason = self._stop_checker.check(req)
        if reason is not None:
            self.end(req, reason)
            return True
        self._outputs.on_tokens(req)
        return False


class _Logprobs:
    """A step's logprobs, brought to the CPU at once and only if somebody asked for them."""

    def __init__(self, output: LogitsProcessorOutput) -> None:
        chosen = output.next_token_logprobs
        self._chosen: list[float] = [] if chosen is None else chosen.tolist()
        self._top_values = output.next_token_top_logprobs_val
        self._top_ids = output.next_token_top_logprobs_idx

    def append_to(self, req: Req, row: int) -> None:
        req.output_logprobs.append(self._chosen[row])
        if req.top_logprobs_num and self._top_values is not None and self._top_ids is not None:
            pairs = zip(self._top_values[row], self._top_ids[row], strict=True)
            req.output_top_logprobs.append(list(pairs))

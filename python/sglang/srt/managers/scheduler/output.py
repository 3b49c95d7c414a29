"""Outputs of a scheduler: token ids to the detokenizer, answers to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    RequestOutput,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.requests.req import Req


class OutputCollector:
    """Collects the messages that leave at the end of a tick.

    A request that streams has an output for its first token, then one every `stream_interval`
    tokens, and one at its end. Any other request has one at its end.

    Args:
        stream_interval: Tokens between two outputs.
    """

    def __init__(self, stream_interval: int) -> None:
        self._stream_interval = stream_interval
        self._outputs: list[RequestOutput] = []
        self._answers: list[ControlReqOutput] = []

    def on_tokens(self, req: Req) -> None:
        """`req` has a new token, or has ended."""
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
        """Reply to a control request."""
        self._answers.append(answer)

    def take(self) -> list[BatchTokenIDOutput | ControlReqOutput]:
        """Take the messages collected since the last call; tokens first."""
        taken: list[BatchTokenIDOutput | ControlReqOutput] = []
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
        skip_special_tokens=spec.sampling_params.skip_special_tokens,
        shown_chars=(
            None
            if progress.stop_finder is None
            else progress.stop_finder.shown_chars(ended=progress.finish_reason is not None)
        ),
    )

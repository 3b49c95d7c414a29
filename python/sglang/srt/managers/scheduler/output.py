"""What a step produced, on its way out: token ids to the detokenizer, answers to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    RequestOutput,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.req import Req


class OutputCollector:
    """Collects what leaves at the end of a tick.

    A streaming request speaks at its first token, then every `stream_interval` tokens, and at its
    end; any other at its end alone.

    Args:
        stream_interval: Tokens.
    """

    def __init__(self, stream_interval: int) -> None:
        self._stream_interval = stream_interval
        self._outputs: list[RequestOutput] = []
        self._answers: list[ControlReqOutput] = []

    def on_tokens(self, req: Req) -> None:
        """`req` has a new token, or has ended."""
        if req.finish_reason is None:
            if not req.stream:
                return
            if req.num_sent and len(req.output_ids) - req.num_sent < self._stream_interval:
                return
        self._outputs.append(self._new_of(req))
        req.num_sent = len(req.output_ids)

    def refuse(self, output: RequestOutput) -> None:
        """The only output of a request that was never accepted."""
        self._outputs.append(output)

    def answer(self, answer: ControlReqOutput) -> None:
        """Reply to a control request."""
        self._answers.append(answer)

    def take(self) -> list[BatchTokenIDOutput | ControlReqOutput]:
        """What was collected since the last call; tokens first."""
        taken: list[BatchTokenIDOutput | ControlReqOutput] = []
        if self._outputs:
            taken.append(BatchTokenIDOutput(outputs=self._outputs))
            self._outputs = []
        if self._answers:
            taken.extend(self._answers)
            self._answers = []
        return taken

    @staticmethod
    def _new_of(req: Req) -> RequestOutput:
        begin = req.num_sent
        tops = req.output_top_logprobs[begin:] if req.top_logprobs_num else None
        is_first = begin == 0 and req.logprob_start_len >= 0
        finder, ended = req.stop_finder, req.finish_reason is not None
        return RequestOutput(
            rid=req.rid,
            output_ids=req.output_ids[begin:],
            finish_reason=req.finish_reason,
            prompt_tokens=len(req.origin_input_ids),
            completion_tokens=len(req.output_ids),
            cached_tokens_details=req.cached_tokens_details,
            output_logprobs=req.output_logprobs[begin:] if req.return_logprob else None,
            output_top_logprobs=tops if req.return_logprob else None,
            input_logprobs=req.input_logprobs if is_first else None,
            input_top_logprobs=req.input_top_logprobs if is_first else None,
            queue_time=req.queue_time,
            skip_special_tokens=req.sampling_params.skip_special_tokens,
            shown_chars=None if finder is None else finder.shown_chars(ended=ended),
        )

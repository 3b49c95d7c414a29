"""Decides whether a request's newest token ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang.srt.managers.io_struct import FinishReason

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_req import Req


class StopTokenizer(Protocol):
    """The part of a tokenizer that finding stop strings needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""


class StopChecker:
    """Stop tokens and lengths for all requests, stop strings for those that have some.

    Args:
        tokenizer: Decodes the tail of a request with stop strings; None where there is none,
            and then no request may have any.
    """

    def __init__(self, tokenizer: StopTokenizer | None) -> None:
        self._tokenizer = tokenizer

    def check(self, req: Req) -> FinishReason | None:
        """Why `req` ends with its last output token, or None."""
        num_output = len(req.output_ids)
        params = req.sampling_params
        if params.max_new_tokens == 0:
            return FinishReason(type="length", length=0)
        if req.matcher is not None:
            failure = req.matcher.failure
            if failure is not None:
                return FinishReason(type="abort", message=failure, status_code=400)
            if req.matcher.is_terminated():
                return FinishReason(type="stop", matched=req.output_ids[-1])
        if num_output >= params.min_new_tokens:
            token = req.output_ids[-1]
            if token in req.stop_token_ids:
                return FinishReason(type="stop", matched=token)
            if params.stop is not None:
                matched = self._matched_string(req)
                if matched is not None:
                    return FinishReason(type="stop", matched=matched)
        if num_output >= req.max_new_tokens:
            return FinishReason(type="length", length=num_output)
        return None

    def _matched_string(self, req: Req) -> str | None:
        """The stop string that the last token completes; the earliest in the text, if several."""
        assert self._tokenizer is not None, "stop strings are refused without a tokenizer"
        stops = req.sampling_params.stop_strings
        # A token stands for a byte at least; some more for a character cut at the begin.
        window = max(len(stop.encode("utf-8", "surrogatepass")) for stop in stops) + 4
        tail_ids = req.output_ids[-window:]
        tail = self._decode(req, tail_ids)
        begin = 0
        if req.sampling_params.min_new_tokens > 0:
            # Matches that were complete before did not count then and do not count now.
            begin = len(self._decode(req, tail_ids[:-1]))
        found: list[tuple[int, str]] = []
        for stop in stops:
            position = tail.find(stop, max(0, begin - len(stop) + 1))
            if position >= 0:
                found.append((position, stop))
        return min(found)[1] if found else None

    def _decode(self, req: Req, ids: list[int]) -> str:
        assert self._tokenizer is not None
        skip = req.sampling_params.skip_special_tokens
        return self._tokenizer.decode(ids, skip_special_tokens=skip)

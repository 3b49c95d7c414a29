"""Decides whether a request's newest token ends it: tokens, lengths, stop strings and patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.managers.scheduler.requests.stop_finder import (
    MATCH_COST,
    StopFinder,
    StopRegexTooSlow,
)
from sglang.srt.messages.io_struct import FinishReason, abort_reason

if TYPE_CHECKING:
    from sglang.srt.managers.detokenizer.detokenizer_manager import DecoderFactory
    from sglang.srt.managers.scheduler.requests.req import Req

_TOO_SLOW: Final = abort_reason(
    f"stop_regex: matching it takes more than {MATCH_COST * 1e3:g} ms for each token: simplify it",
    400,
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FinishReason | None])


class StopChecker:
    """Checks stop tokens and lengths of all requests, and stop strings and patterns where present.

    Patterns and grammars have a budget of CPU time, which runs out at different times on different
    ranks. Rank 0 alone checks requests with such a budget, and broadcasts the results. Without
    `new_decoder`, which takes a tokenizer, no request may have stop strings or patterns.
    """

    def __init__(self, new_decoder: DecoderFactory | None, group: RankGroup) -> None:
        self._new_decoder = new_decoder
        self._group = group

    def check(self, reqs: Sequence[Req]) -> list[FinishReason | None]:
        """For each of `reqs` the reason why its last output token ends it, or None. A collective if
        one of them has a pattern or a grammar."""
        timed = [req for req in reqs if _is_timed(req)] if self._group.size > 1 else []
        if not timed:
            return [self._check(req) for req in reqs]
        if self._group.rank == 0:
            reasons = [self._check(req) for req in reqs]
            sent = [reason for req, reason in zip(reqs, reasons, strict=True) if _is_timed(req)]
            self._group.broadcast(_encoder.encode(sent))
            return reasons
        received = iter(_decoder.decode(self._group.broadcast(None)))
        return [next(received) if _is_timed(req) else self._check(req) for req in reqs]

    def _check(self, req: Req) -> FinishReason | None:
        spec, progress = req.spec, req.progress
        params = spec.sampling_params
        num_output = len(progress.output_ids)
        if params.max_new_tokens == 0:
            return FinishReason(type="length", length=0)
        token = progress.output_ids[-1]
        if progress.matcher is not None:
            failure = progress.matcher.failure
            if failure is not None:
                return abort_reason(failure, 400)
            if progress.matcher.is_terminated():
                return FinishReason(type="stop", matched=token)
        may_stop = num_output >= params.min_new_tokens
        if may_stop and token in req.stop_token_ids:
            return FinishReason(type="stop", matched=token)
        if params.has_text_stops:
            reason = self._check_text(req, may_stop=may_stop)
            if reason is not None:
                return reason
        if num_output >= req.max_new_tokens:
            return FinishReason(type="length", length=num_output)
        return None

    def _check_text(self, req: Req, *, may_stop: bool) -> FinishReason | None:
        progress, params = req.progress, req.spec.sampling_params
        if progress.stop_finder is None:
            assert self._new_decoder is not None, "stop strings are refused without a tokenizer"
            progress.stop_finder = StopFinder(params, self._new_decoder(params.skip_special_tokens))
        try:
            match = progress.stop_finder.advance(progress.output_ids, may_stop=may_stop)
        except StopRegexTooSlow:
            return _TOO_SLOW
        return None if match is None else FinishReason(type="stop", matched=match.stop)


def _is_timed(req: Req) -> bool:
    """True if the end of `req` depends on CPU time. It does not change while the request runs."""
    return req.progress.matcher is not None or bool(req.spec.sampling_params.stop_patterns)

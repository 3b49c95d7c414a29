"""The spans of a request that has ended, from the times that the scheduler reported with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.managers.tokenizer.request_state import RequestState

if TYPE_CHECKING:
    from sglang.srt.observability.tracing import TimedSpan, Tracer


def record_request(tracer: Tracer, state: RequestState) -> None:
    """Record the trace of a request that has no reader any more, if it is sampled."""
    if state.trace_context is None:
        return
    from sglang.srt.observability.tracing import TimedSpan

    cached, reason = state.cached_tokens_details, state.finish_reason
    failed = state.failure is not None or (reason is not None and reason.type == "abort")
    end = state.finished_time or time.monotonic()
    root = TimedSpan(
        "request",
        state.created_time,
        end,
        {
            "gen_ai.response.id": state.rid,
            "gen_ai.response.finish_reasons": (state.outcome,),
            "gen_ai.usage.input_tokens": state.prompt_tokens,
            "gen_ai.usage.output_tokens": len(state.output_ids),
            "sglang.cached_tokens.device": cached.device,
            "sglang.cached_tokens.host": cached.host,
            "sglang.cached_tokens.storage": cached.storage,
            **_cuts_of(state),
        },
        state.outcome if failed else None,
    )
    tracer.record(state.trace_context, root, _stages_of(state, TimedSpan))


def _cuts_of(state: RequestState) -> dict[str, str]:
    """Why each tier brought no more, as `REASON at TOKEN`."""
    report = state.cache_report
    if report is None:
        return {}
    return {
        f"sglang.cache_cut.{cut.tier or 'prompt'}": f"{cut.reason} at {cut.at}"
        for cut in report.cuts
    }


def _stages_of(state: RequestState, make: type[TimedSpan]) -> list[TimedSpan]:
    """The stages of a request that has ended, by the clock of this machine."""
    stages, end = state.stages, state.finished_time
    if stages is None or end is None:
        return []
    spans = []
    if stages.queue is not None:
        spans.append(make("queue", state.created_time, state.created_time + state.queue_time, {}))
    report = state.cache_report
    for one in (report.spans or ()) if report is not None else ():
        facts: dict[str, str | int] = {"sglang.tokens": one.tokens}
        if one.outcome is not None:
            facts["sglang.outcome"] = one.outcome
        spans.append(make(one.name, one.begin, one.end, facts))
    first_token = end - (stages.decode or 0.0)
    if stages.transfer is not None:
        # On a prefill server nothing follows it, on a decode server the output does.
        spans.append(make("transfer", first_token - stages.transfer, first_token, {}))
    if stages.decode is not None:
        spans.append(make("decode", first_token, end, {"sglang.tokens": len(state.output_ids)}))
    return spans

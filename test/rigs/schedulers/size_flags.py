"""Servers of all sizes: extreme values of flags, and prompts of all critical lengths."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import ToScheduler

_NEVER_ENDING: Final = 10**6
"""Tokens of an output that only a full pool or context ends."""


@st.composite
def size_flags(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes from the smallest to more than enough, and sizes near a page."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    page = one(1, 2, 3, 4, 16, 64)
    values = {
        "page_size": page,
        "max_total_tokens": one(1, 2, page - 1, page, page + 1, 2 * page, 5 * page + 1, 400),
        "context_length": one(None, 1, 2, 3, page, page + 1, 40),
        "chunked_prefill_size": one(None, -1, 0, 1, page, 2 * page, 3 * page),
        "max_prefill_tokens": one(1, page - 1, page, page + 1, 2 * page, 5 * page - 1, 16384),
        "max_running_requests": one(None, 1, 2, 9, 500, 10**30),
        "max_queued_requests": one(1, 2, 4096),
        "schedule_conservativeness": one(1e-300, 0.01, 1.0, 1e300),
        "stream_interval": one(1, 3, 10**12),
        "schedule_policy": one("fcfs", "lpm"),
        "target_inter_token_latency": one(None, 1e-9, 2.0, 1e9),
    }
    cache = one("L1", "L1", "L2", "L2", "none")
    if cache == "L2":
        policies = ("write_through", "write_through_selective", "write_back")
        values |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": one(1e-9, 0.3, 1.0, 2.0),
            "hicache_size": one(0.0, 0.0, 1e-12, 1e-6, 1e-4),
            "hicache_write_policy": one(*policies),
        }
    elif cache == "none":
        values |= {"disable_radix_cache": True, "schedule_policy": "fcfs"}
    return values


def start_with(model_path: Path, flags: dict[str, Any]) -> SchedulerRig | None:
    """The scheduler of a server with these flags; None if the server refuses to start."""
    try:
        return SchedulerRig(model_path, pool_tokens=None, **flags)
    except ValueError as refusal:
        text = str(refusal)
    assert "--" in text, f"no flag is named: {text}"
    return None


def _lengths_of_prompts(rig: SchedulerRig) -> list[int]:
    """The shortest and the longest prompts, and lengths near each size."""
    limits = rig.scheduler.state.limits
    sizes = (limits.page_size, limits.chunk_tokens or 0, limits.max_prefill_tokens)
    around = {size + more for size in sizes for more in (-1, 0, 1)}
    most = limits.max_input_tokens
    assert most >= 1, "the server cannot answer any prompt"
    return sorted(length for length in {1, 2, *around, most - 1, most} if 1 <= length <= most)


def serve_all(rig: SchedulerRig) -> None:
    """Serve prompts of all critical lengths at once, with short and endless outputs; then, one by
    one, those that a full queue refused.

    Asserts that each output has the expected length, within a number of ticks that follows from
    the work.
    """
    limits = rig.scheduler.state.limits
    lengths = _lengths_of_prompts(rig)
    ids = prompt(1, lengths[-1])
    wanted = {
        f"{length}-{most}": rig.request(f"{length}-{most}", ids[:length], greedy(most), stream=True)
        for length in lengths
        for most in (1, 4, _NEVER_ENDING)
    }
    _run_bounded(rig, *wanted.values())
    for rid, message in wanted.items():
        reason = rig.results[rid].finish_reason
        assert reason is not None, rid
        if reason.status_code == 503:
            assert "--max-queued-requests" in (reason.message or ""), reason
            del rig.results[rid]
            _run_bounded(rig, message)
        got = rig.results[rid]
        room = limits.max_request_tokens - len(message.input_ids)
        expected = min(message.sampling_params.max_new_tokens, room)
        assert got.finish_reason is not None
        assert (got.finish_reason.type, len(got.output_ids)) == ("length", expected), rid


def _run_bounded(rig: SchedulerRig, *messages: ToScheduler) -> None:
    """Run until idle, within a bound on ticks. Ticks that only wait for a copy do not count."""
    state = rig.scheduler.state
    rig.step(*messages)
    # Each token of each request may need a step of its own, repeated after retractions.
    most = 20 + 4 * state.limits.max_request_tokens * len(messages)
    ticks = 0
    deadline = time.monotonic() + 60.0
    while not rig.scheduler.is_idle():
        waiting = len(state.queues.waiting)
        assert ticks < most, f"{waiting} wait after {ticks} ticks: {state.counters}"
        if rig.scheduler.poll_timeout_ms() and state.tree.is_busy():
            assert time.monotonic() < deadline, f"copies do not end: {state.tree.is_busy()}"
            time.sleep(0.0001)
        else:
            ticks += 1
        rig.step()
    rig.assert_clean()


def is_served_where_accepted(model: Path, flags: dict[str, Any]) -> bool:
    """Start with `flags` and serve prompts near all limits; False if the flags are refused."""
    rig = start_with(model, flags)
    if rig is None:
        return False
    try:
        serve_all(rig)
    finally:
        rig.close()
    return True

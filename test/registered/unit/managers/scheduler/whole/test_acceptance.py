"""Acceptance in numbers: that of a cold run, from every tier, after retractions, and on a decode
server. Wrong entries of the draft layer change it without any other sign.

The drafts are the built-in hybrid's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.disaggregation.pd_rig import LocalMover, PdRig
from rigs.schedulers.scheduler_rig import Collected, SchedulerRig, greedy, prompt
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE: Final = 16
MODEL: Final = BUILTIN_HYBRID_MODEL_DIR
PROMPTS: Final = [prompt(seed, length) for seed, length in ((2, 100), (3, 68), (4, 68), (5, 68))]
"""The model answers them with long sequences of a few tokens, without a period."""
NEW_TOKENS: Final = 80
SIZES: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "dtype": "float32",
    "num_states": 24,
    "pool_tokens": 704,
}
ARGS: Final[dict[str, Any]] = {
    **SIZES,
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
}
TIERS: Final[dict[str, Any]] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": json.dumps(
        {"prefetch_threshold": PAGE, "prefetch_timeout_base": 30}
    ),
}


def accepted_length(found: Iterable[Collected], words: list[list[int]]) -> float:
    """Mean tokens of a verification in all requests, which must have said `words`."""
    count = accepted = 0
    for got, want in zip(found, words, strict=True):
        assert got.output_ids == want
        assert got.last is not None and got.last.verifications is not None
        count += got.last.verifications.count
        accepted += got.last.verifications.accepted
    return 1 + accepted / count


def ask(rig: SchedulerRig, name: str) -> list[Collected]:
    """Run all prompts together."""
    rids = [f"{name} {number}" for number in range(len(PROMPTS))]
    requests = zip(rids, PROMPTS, strict=True)
    rig.step(*(rig.request(rid, ids, greedy(NEW_TOKENS)) for rid, ids in requests))
    rig.settle(60.0)
    return [rig.results[rid] for rid in rids]


@pytest.mark.settled
@pytest.mark.usefixtures("reads_are_never_late")
def test_acceptance_is_the_same_everywhere(tmp_path: Path) -> None:
    words = SchedulerRig(MODEL, **SIZES).generate(PROMPTS, NEW_TOKENS)
    lengths: dict[str, float] = {}
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        closing(SchedulerRig(MODEL, **ARGS, **TIERS)) as rig,
    ):
        for tier in ("none", "device", "host", "storage"):
            if tier == "host":
                rig.generate([prompt(seed, 340) for seed in (50, 51)], 1)
            elif tier == "storage":
                rig.step(FlushCacheReqInput(req_id="flush"))
            found = ask(rig, tier)
            for got in found:
                assert got.last is not None
                assert got.last.cached_tokens_details.lowest_tier == tier
            lengths[tier] = accepted_length(found, words)
    small = SchedulerRig(MODEL, **{**ARGS, "pool_tokens": 512}, schedule_conservativeness=0.01)
    lengths["retracted"] = accepted_length(ask(small, "retracted"), words)
    assert small.scheduler.state.counters.retractions > 0
    with PdRig(MODEL, LocalMover(), **ARGS) as pair:
        requests = [pair.request(f"{n}", ids, greedy(NEW_TOKENS)) for n, ids in enumerate(PROMPTS)]
        pair.run(*requests)
        found = [pair.result(one.rid) for one in requests]
        lengths["decode server"] = accepted_length(found, words)
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0
    assert 2.5 < lengths["none"] < 3.5, "most drafts are right, and not all"
    for name, length in lengths.items():
        assert length == pytest.approx(lengths["none"], rel=0.02), (name, lengths)

"""Cached tokens that several requests of a prefill compute again: all are stored as padding, and
each request reads its own from its cached page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.schedulers.scheduler_rig import Collected, SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.fp8_rows import read_rows
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

CACHED = [prompt(1, 64), prompt(2, 48)]
LONGER = [CACHED[0] + prompt(5, 32), CACHED[1] + prompt(6, 25)]
PROMPTS = [*CACHED, *LONGER, prompt(9, 33)]
"""One prefill: two prompts that are cached whole, two that are cached in part, and a new one."""
DRAFTS: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
ELEMENTS = {32 + 4 + 2 * 8: 32, 24 + 4: 24}
"""Elements of a row in fp8, by its bytes: a latent row's, an indexer key's."""


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    # A smaller `index_topk` would let the indexer choose among a cached prefix's pool rows.
    families: dict[str, dict[str, Any]] = {
        "deepseek_v3": {}, "deepseek_v32": {"index_topk": 80}, "glm4_moe": {}
    }  # fmt: skip
    return {one: tiny_model(one, eos_token_id=None, mtp=True, **families[one]) for one in families}


def answers(rig: SchedulerRig, tag: str, prompts: Sequence[list[int]]) -> list[Collected]:
    rids = [f"{tag}{i}" for i in range(len(prompts))]
    messages = [
        rig.request(rid, ids, greedy(4), return_logprob=True)
        for rid, ids in zip(rids, prompts, strict=True)
    ]
    rig.run(*messages)
    return [rig.results[rid] for rid in rids]


def pages_of(rig: SchedulerRig, ids: list[int]) -> list[torch.Tensor]:
    """Rows of a prompt in L1, as fp32 values: a tensor for each pool part and layer."""
    slots = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids))).device_indices
    pools = [pool for pool in rig.pools if isinstance(pool, PagedDevicePool)]
    rows = [layer[slots] for pool in pools for part in pool.parts for layer in part]
    return [read_rows(row, ELEMENTS.get(row.shape[-1], 0), torch.float32) for row in rows]


@pytest.mark.settled
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("family", "dtype", "page_size"),
    [
        ("deepseek_v3", "fp8_e4m3", 1),
        ("deepseek_v3", "fp8_e4m3", 16),
        ("deepseek_v3", "bfloat16", 16),
        ("deepseek_v32", "fp8_e4m3", 16),
        ("glm4_moe", "bfloat16", 16),
    ],
)
def test_words_and_pages_are_those_of_a_cold_engine(
    models: dict[str, Path], family: str, dtype: str, page_size: int, drafts: dict[str, Any]
) -> None:
    def rig(**args: Any) -> SchedulerRig:
        return SchedulerRig(
            models[family],
            pool_tokens=1024,
            page_size=page_size,
            kv_cache_dtype=dtype,
            **args,
            **drafts,
        )

    without, cold, warm = rig(disable_radix_cache=True), rig(), rig()
    want = [answers(without, f"{i}-", [ids])[0] for i, ids in enumerate(PROMPTS)]
    for i, ids in enumerate(LONGER):
        answers(cold, f"{i}-", [ids])
    for i, ids in enumerate(CACHED):
        answers(warm, f"{i}-", [ids])
    got = answers(warm, "together-", PROMPTS)
    hits = [one.last and one.last.cached_tokens_details.total for one in got]
    assert hits == [63, 47, 64, 48, 0]
    for one, alone in zip(got, want, strict=True):
        assert one.output_ids == alone.output_ids
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    for ids in LONGER:
        for now, then in zip(pages_of(warm, ids), pages_of(cold, ids), strict=True):
            assert len(now) == len(ids) // page_size * page_size
            # Sums in another order now and then move a number to the next in its dtype.
            assert (now - then).norm() < 1e-3 * then.norm()

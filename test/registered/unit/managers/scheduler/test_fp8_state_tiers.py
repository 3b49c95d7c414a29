"""Latent rows and indexer keys in fp8 over three tiers: words and bytes of a cold engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt, stored_in_files
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

FAMILIES: Final = ("deepseek_v2", "deepseek_v32", "glm_moe_dsa")
FP8: Final = "fp8_e4m3"
PAGE: Final = 16
WORDS: Final = 10


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {family: tiny_model(family, eos_token_id=None) for family in FAMILIES}


def rig_of(path: Path, dtype: str, layout: str = "page_first_direct") -> SchedulerRig:
    return SchedulerRig(
        path,
        kv_cache_dtype=dtype,
        pool_tokens=320,
        page_size=PAGE,
        chunked_prefill_size=64,
        hicache_ratio=4.0,
        hicache_mem_layout=layout,
        **stored_in_files(PAGE),
    )


def ask(rig: SchedulerRig, rid: str, ids: list[int]) -> tuple[int, int, int]:
    """Tokens of the prompt that came from L1, L2 and L3."""
    rig.step(rig.request(rid, ids, greedy(WORDS)))
    rig.settle()
    return rig.results[rid].cached


def pages_of(rig: SchedulerRig, ids: list[int]) -> list[torch.Tensor]:
    """The bytes that L1 has of a prompt, of every pool and layer."""
    slots = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids))).device_indices
    pools = [pool for pool in rig.pools if isinstance(pool, PagedDevicePool)]
    return [buffer[slots] for pool in pools for part in pool.parts for buffer in part]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v2", "page_first_kv_split"),
        ("deepseek_v32", "page_first_direct"),
        ("glm_moe_dsa", "layer_first"),
    ],
)
def test_every_tier_gives_the_words_and_bytes_of_no_cache(
    models: dict[str, Path], family: str, layout: str
) -> None:
    ids, path = prompt(1, 100), models[family]
    cold_rig = SchedulerRig(
        path, disable_radix_cache=True, page_size=PAGE, chunked_prefill_size=64, kv_cache_dtype=FP8
    )
    (cold,) = cold_rig.generate([ids], WORDS)
    rig = rig_of(path, FP8, layout)
    try:
        found, pages = [ask(rig, "cold", ids)], pages_of(rig, ids)
        assert all(page.dtype is torch.uint8 and page.any() for page in pages)
        for rid in ("device", "host", "storage"):
            found.append(ask(rig, rid, ids))
            assert all(map(torch.equal, pages_of(rig, ids), pages)), rid
            if rid == "device":
                rig.tree.evict(EvictParams(num_tokens=1000))
            else:
                rig.step(FlushCacheReqInput(req_id="flush"))
                assert rig.answers.pop().success
            for seed in range(10, 12):  # Or the slots would still have the right bytes.
                ask(rig, f"{rid}-{seed}", prompt(seed, 120))
        assert found == [(0, 0, 0), (96, 0, 0), (0, 96, 0), (0, 0, 96)]
        words = [rig.results[rid].output_ids for rid in ("cold", "device", "host", "storage")]
        assert words == [cold] * 4
    finally:
        rig.close()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32"])
def test_engines_with_another_dtype_read_nothing_of_it(
    models: dict[str, Path], family: str
) -> None:
    ids, found = prompt(2, 100), []
    for dtype in (FP8, "bfloat16", FP8):
        rig = rig_of(models[family], dtype)
        try:
            found.append(ask(rig, dtype, ids))
        finally:
            rig.close()
    assert found == [(0, 0, 0), (0, 0, 0), (0, 0, 96)]

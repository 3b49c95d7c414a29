"""Prefill and decode apart, with latent rows and indexer keys in fp8: words and bytes of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.disaggregation.pd_rig import LocalMover, PdRig
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

FAMILIES: Final = ("deepseek_v2", "deepseek_v32")
ARGS: Final[dict[str, Any]] = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "pool_tokens": 1024,
}
FP8: Final[dict[str, Any]] = {"kv_cache_dtype": "fp8_e4m3"}
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate((5, 16, 100, 200))]


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {family: tiny_model(family, eos_token_id=None) for family in FAMILIES}


def pages_of(rig: SchedulerRig, ids: list[int]) -> list[torch.Tensor]:
    """The bytes that L1 has of a prompt's whole pages, of every pool and layer."""
    slots = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids))).device_indices
    assert len(slots) == len(ids) // 16 * 16
    pools = [pool for pool in rig.pools if isinstance(pool, PagedDevicePool)]
    return [buffer[slots] for pool in pools for part in pool.parts for buffer in part]


@pytest.mark.parametrize("unit_bytes", [None, 1 << 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_has_the_words_and_bytes_of_one_scheduler(
    models: dict[str, Path], family: str, unit_bytes: int | None
) -> None:
    alone = SchedulerRig(models[family], **ARGS, **FP8)
    args = {**ARGS, **FP8, "unit_bytes": unit_bytes}
    with PdRig(models[family], LocalMover(), **args) as pair:
        for number, ids in enumerate(PROMPTS):
            (want,) = alone.generate([ids], 12)
            for turn in ("cold", "cached"):
                pair.run(pair.request(f"{turn} {number}", ids, greedy(12)))
                assert pair.result(f"{turn} {number}").output_ids == want
            written, read, single = (pages_of(rig, ids) for rig in (*pair.rigs, alone))
            assert all(map(torch.equal, read, written)) and all(map(torch.equal, read, single))
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_servers_with_unlike_state_are_no_pair(models: dict[str, Path], family: str) -> None:
    with PdRig(models[family], LocalMover(), **ARGS, prefill=FP8) as pair:
        message = pair.request("unlike", PROMPTS[2])
        pair.until(lambda: "unlike" in pair.decode.results, message)
        reason = pair.result("unlike").finish_reason
        assert reason is not None and reason.message is not None
        assert "latent[1, 52] torch.float8_e4m3fn there, latent[1, 40] torch.float32 here" in (
            reason.message
        )
        assert "start both with the same model" in reason.message

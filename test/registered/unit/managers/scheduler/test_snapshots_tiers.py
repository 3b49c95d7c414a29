"""A model with recurrent states over three tiers: the same words, wherever a prefix comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.managers.messages.io_struct import CachedTokensDetails, FlushCacheReqInput
from sglang.srt.mem_cache.tree.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.models.tiny_models import save_tiny_checkpoint
from sglang.test.schedulers.scheduler_rig import SchedulerRig, greedy, prompt

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

PAGE = 16
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("hybrids")
    for family in FAMILIES:
        save_tiny_checkpoint(root / family, family, eos_token_id=None)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(name="storage_dir", autouse=True)
def make_storage_dir(tmp_path: Path) -> Iterator[None]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "l3")):
        yield


def rig_of(path: Path, **args: Any) -> SchedulerRig:
    settings: dict[str, Any] = {
        "pool_tokens": 320,
        "num_states": 12,
        "page_size": PAGE,
        "mamba_track_interval": 2 * PAGE,
        "chunked_prefill_size": 64,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
        **args,
    }
    return SchedulerRig(path, **settings)


def ask(rig: SchedulerRig, rid: str, ids: list[int], count: int = 10) -> CachedTokensDetails:
    rig.step(rig.request(rid, ids, greedy(count)))
    rig.settle()
    last = rig.results[rid].last
    assert last is not None
    return last.cached_tokens_details


def tiers(details: CachedTokensDetails) -> tuple[int, int, int]:
    return details.device, details.host, details.storage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_the_same_words_from_every_tier_and_across_a_restart(
    models: dict[str, Path], family: str, layout: str
) -> None:
    ids = prompt(1, 100)
    cold_rig = SchedulerRig(models[family], disable_radix_cache=True, page_size=PAGE)
    (cold,) = cold_rig.generate([ids], 10)
    rig = rig_of(models[family], hicache_mem_layout=layout)
    try:
        found = [tiers(ask(rig, rid, ids)) for rid in ("cold", "device")]
        # Push the prompt out of L1, not out of L2.
        for seed in range(10, 15):
            ask(rig, f"filler-{seed}", prompt(seed, 120))
        found.append(tiers(ask(rig, "host", ids)))
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        found.append(tiers(ask(rig, "storage", ids)))
        assert found == [(0, 0, 0), (96, 0, 0), (0, 96, 0), (0, 0, 96)]
        for rid in ("cold", "device", "host", "storage"):
            assert rig.results[rid].output_ids == cold, rid
    finally:
        rig.close()
    restarted = rig_of(models[family], hicache_mem_layout=layout)
    try:
        assert tiers(ask(restarted, "restart", ids)) == (0, 0, 96)
        assert restarted.results["restart"].output_ids == cold
    finally:
        restarted.close()


def test_a_state_alone_comes_back_from_the_host(models: dict[str, Path]) -> None:
    """Its slot was taken by others; its pages are still on the device."""
    rig = rig_of(models["qwen3_5"], pool_tokens=2048, num_states=4, max_requests=1)
    ids = prompt(2, 100)
    try:
        ask(rig, "cold", ids)
        for seed in range(20, 24):
            ask(rig, f"filler-{seed}", prompt(seed, 40))
        assert tiers(ask(rig, "warm", ids)) == (96, 0, 0)
        assert rig.results["warm"].output_ids == rig.results["cold"].output_ids
        rig.assert_clean()
    finally:
        rig.close()


def test_pages_whose_state_finds_no_room_are_computed_again(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper part of the prefix is on the device without a state, the lower part on the host."""
    rig = rig_of(models["qwen3_5"])
    ids = prompt(5, 100)
    try:
        ask(rig, "cold", ids)
        rig.tree.match_prefix(MatchPrefixParams(RadixKey([*ids[:48], 1])))
        rig.tree.evict(EvictParams(num_tokens=48))
        match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids)))
        assert (len(match.device_indices), match.host_hit_length) == (48, 48)
        load = rig.tree.init_load_back
        monkeypatch.setattr(
            rig.tree, "init_load_back", lambda params: load(replace(params, mem_quota=0))
        )
        counters = rig.scheduler.state.counters
        before = counters.prefill_tokens
        assert tiers(ask(rig, "warm", ids)) == (0, 0, 0)
        assert counters.prefill_tokens - before == len(ids)
        assert rig.results["warm"].output_ids == rig.results["cold"].output_ids
    finally:
        rig.close()


def test_what_was_said_comes_back_with_the_next_turn_from_storage(
    models: dict[str, Path],
) -> None:
    rig = rig_of(models["qwen3_5"])
    ids = prompt(3, 20)
    try:
        ask(rig, "first", ids, 60)
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        turn = [*ids, *rig.results["first"].output_ids, *prompt(4, 5)]
        assert tiers(ask(rig, "next", turn)) == (0, 0, 64)
        fresh = SchedulerRig(models["qwen3_5"], disable_radix_cache=True, page_size=PAGE)
        assert [rig.results["next"].output_ids] == fresh.generate([turn], 10)
    finally:
        rig.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

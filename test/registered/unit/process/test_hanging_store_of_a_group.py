"""No step waits for a group whose L3 hangs: DP groups that share experts, over one store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rigs.groups.group_rigs import GroupRigs
from rigs.groups.hung_store import client_of
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from rigs.stores.object_store import IN_PLACE, STORE_KEY, ObjectStore
from sglang.srt.messages.io_struct import AttachHiCacheStorageReqInput, FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

PAGE: Final = 8
LONG: Final = 60


TIERS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
}


def attach(store: ObjectStore) -> AttachHiCacheStorageReqInput:
    extra = {STORE_KEY: store.name, "prefetch_threshold": PAGE}
    return AttachHiCacheStorageReqInput(
        req_id="attach",
        hicache_storage_backend=IN_PLACE,
        hicache_storage_backend_extra_config_json=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy=None,
    )


def test_groups_step_while_the_store_of_one_hangs(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3_moe", eos_token_id=None)
    prompts = [prompt(1, 40), prompt(2, 30)]
    rig = SchedulerRig(tmp_path)
    expected = [
        rig.generate([one], count)[0] for one, count in zip(prompts, (8, LONG), strict=True)
    ]
    rig.close()
    with (
        ObjectStore(seed=2) as store,
        GroupRigs(tmp_path, 2, args=lambda dp_rank: TIERS) as groups,
    ):
        first, second = groups.rigs
        for rig in groups.rigs:
            rig.post(attach(store))
        groups.wait(lambda: all(len(rig.answers) == 1 for rig in groups.rigs))
        first.post(first.request("stores", prompts[0], greedy(8)))
        groups.wait(lambda: first.has_ended("stores"))
        first.post(FlushCacheReqInput(req_id="flush", timeout=30.0))
        groups.wait(lambda: len(first.answers) == 2)
        assert all(answer.success for answer in first.answers), first.answers
        client = client_of(first)
        assert client is not None
        store.hang_for(client)
        first.post(first.request("reads", prompts[0], greedy(8)))
        groups.wait(lambda: store.happened["hang of one client"] > 0)
        steps = len(first.agreement.steps)
        second.post(second.request("beside", prompts[1], greedy(LONG)))
        groups.wait(lambda: second.has_ended("beside"))
        assert second.results["beside"].output_ids == expected[1]
        assert first.num_tokens("reads") == 0
        idle = [step.tokens[0] for step in first.agreement.steps[steps:] if step is not None]
        assert idle == [0] * LONG
        store.hang_for(None)
        groups.wait(lambda: first.has_ended("reads"))
        assert first.results["reads"].output_ids == expected[0]
        last = first.results["reads"].last
        assert last is not None and last.cached_tokens_details is not None
        assert last.cached_tokens_details.storage == len(prompts[0]) - 1

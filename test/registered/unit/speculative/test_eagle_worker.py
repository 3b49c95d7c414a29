"""Entries and hidden states of the draft layer that no step of the same request reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.drafts.guesses import recorded
from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from sglang.srt.managers.scheduler.draft_policy import DraftPolicy
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PAGE: Final = 4
SPECULATES: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm_moe_dsa", "qwen3_next"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    """Latent rows, these with indexer keys, and keys and values."""
    return tiny_model(request.param, eos_token_id=None, mtp=True)


def test_position_0_has_an_entry_of_zeros(model: Path) -> None:
    """The draft layer computes no entry there, but pages of equal prompts must have equal bytes."""
    rig = SchedulerRig(model, **SPECULATES)
    layer = rig.worker._runner.model_config.num_hidden_layers
    parts = [
        part[pool.place_to_write(layer)]
        for pool in rig.pools
        if isinstance(pool, PagedDevicePool) and layer in pool.spec.layers
        for part in pool.parts
    ]
    for part in parts:
        part.fill_(1)
    rig.generate([prompt(1, 3 * PAGE + 2), prompt(2, 2 * PAGE + 1)], 2)
    slots = [node.value.tolist() for node in rig.tree.nodes() if node.value is not None]
    assert len(slots) == 2
    for part in parts:
        for first, second, *_ in slots:
            assert not part[first].any()
            assert (part[second] != 1).all()


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_drafts_go_on_from_a_snapshot_of_a_plain_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden state beside the recurrent one is what the next entry needs."""
    ids = prompt(3, 10)
    rig = SchedulerRig(model, mamba_track_interval=4 * PAGE, **SPECULATES)
    with monkeypatch.context() as patched:
        patched.setattr(DraftPolicy, "width", lambda *_: 1)
        said = rig.generate([ids], 40)[0]
    turn = [*ids, *said, *prompt(4, 5)]
    cold = SchedulerRig(model, disable_radix_cache=True, **SPECULATES)
    with recorded() as wanted:
        words = cold.generate([turn], 12)
    with recorded() as found:
        assert rig.generate([turn], 12) == words
    assert found == wanted

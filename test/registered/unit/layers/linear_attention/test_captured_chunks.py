"""Captured prefills of 64 tokens or more compute recurrent layers in chunks, as long ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.layers.delta_layers import poison_new_memory
from rigs.models.kernel_layers import DEVICE, relative_error
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.linear_attention import extend_plan
from sglang.srt.layers.linear_attention.extend_plan import ChunkPlan
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner, Size
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=120, suite="base-b-test-1-gpu-large")

from rigs.layers.replayed_graphs import replayed_driver  # noqa: E402

COUNTS: Final = (64, 128)
STEPS: Final = [(40, 16), (64, 32), (33, 0), (65, 64), (128, 80)]
"""New tokens of prefills, and those before their snapshots."""
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "glm5_next": {"linear_head_dim": 64, "linear_num_heads": 1},
    "kimi_linear": {
        "num_hidden_layers": 3,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 1,
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron_h": {"mamba_head_dim": 32, "ssm_state_size": 64, "chunk_size": 64},
    "qwen3_next": {
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}  # fmt: skip
"""Heads that the kernels for many tokens take."""
FAMILIES: Final = [name for name in SHAPES if DEVICE == "cuda" or name != "glm5_next"]
"""Interpreted, the other layers of GLM-5.3-Flash take too long."""


def driver_of(patch: pytest.MonkeyPatch, path: Path, *, captures: bool) -> StepDriver:
    settings: dict[str, Any] = {"page_size": 16, "num_states": 24, "pool_tokens": 2048}
    if DEVICE == "cuda":
        return StepDriver(path, device="cuda", disable_cuda_graph=not captures, **settings)
    counts = {"counts": COUNTS} if captures else {}
    return replayed_driver(patch, path, max_requests=len(STEPS), **counts, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_prefills_give_what_chunks_without_graphs_give(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, logits, states and snapshots have the same bits where a step has a captured
    size, and new memory is NaN. They are near where it is padded, and on a GPU, where a library's
    products may differ within graphs (Nemotron-H's do, in fp32)."""
    save_tiny_checkpoint(tmp_path, family, max_position_embeddings=1024, **SHAPES[family])
    if DEVICE == "cpu":
        poison_new_memory(monkeypatch)
    captured = driver_of(monkeypatch, tmp_path, captures=True)
    graphs = captured.runner._graphs[-1]
    assert isinstance(graphs, ExtendGraphRunner)
    assert all(isinstance(graphs._plans[Size(count, 1)], ChunkPlan) for count in COUNTS)
    got = steps_of(captured)
    monkeypatch.setattr(extend_plan, "SHORT", 0)
    want = steps_of(driver_of(monkeypatch, tmp_path, captures=False))
    for (count, _), found, wanted in zip(STEPS, got, want, strict=True):
        for one, other in zip(found, wanted, strict=True):
            if count in COUNTS and DEVICE == "cpu":
                assert torch.equal(one, other)
            else:
                assert relative_error(one, other) < 1e-5, count
    for pool in captured.runner.pools.values():
        for buffer in (buffer for part in pool.parts for buffer in part):
            assert buffer.isfinite().all(), "padding writes no stale memory"


def steps_of(driver: StepDriver) -> list[list[torch.Tensor]]:
    """Logits of each step, and the states and conv states of its request and snapshot."""
    pool = state_pool(driver.runner.pools.values())
    assert pool is not None
    found = []
    for row, (count, track) in enumerate(STEPS):
        snapshots = {row: (23, track)} if track else None
        # From nothing, then from a state.
        driver.extend([(row, prompt(COUNTS[0], row))])
        output = driver.extend([(row, prompt(count, row + 50))], snapshots)
        slots = driver.runner.req_to_token_pool.state_slots(torch.tensor([row], device=DEVICE))
        assert slots is not None
        kept = [*slots.tolist(), 23]
        states = (buffer[:, kept].clone() for buffer in pool.buffers)
        found.append([output.next_token_logits.clone(), *states])
    return found

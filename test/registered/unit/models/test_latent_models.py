"""DeepSeek models: logits and words equal transformers' on the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sglang.srt.layers.attention import dsa_backend, mla_backend, token_choice
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import StepDriver, save_tiny_checkpoint

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 64,
}
FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
DENSE = {"first_k_dense_replace": 2}
CASES = [
    *(pytest.param(family, DENSE, id=f"{family}-dense") for family in FAMILIES),
    *(pytest.param(family, {}, id=family) for family in FAMILIES),
    *(
        pytest.param(family, {"rope_parameters": YARN, **DENSE}, id=f"{family}-yarn")
        for family in FAMILIES
    ),
    pytest.param("deepseek_v2", {"q_lora_rank": None}, id="deepseek_v2-no-q-lora"),
    pytest.param(
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        id="deepseek_v2-groups",
    ),
    pytest.param("deepseek_v2", {"routed_scaling_factor": 2.5}, id="deepseek_v2-scaled"),
    pytest.param("deepseek_v2", {"v_head_dim": 40, **DENSE}, id="deepseek_v2-wide-values"),
    pytest.param("deepseek_v3", {"q_lora_rank": None, **DENSE}, id="deepseek_v3-no-q-lora"),
    pytest.param("deepseek_v3", {"rope_interleave": False, **DENSE}, id="deepseek_v3-halves"),
    pytest.param("deepseek_v3", {"attention_bias": True, **DENSE}, id="deepseek_v3-biases"),
    pytest.param("deepseek_v3", {"norm_topk_prob": False}, id="deepseek_v3-not-normalized"),
    pytest.param("deepseek_v3", {"n_group": 1, "topk_group": 1}, id="deepseek_v3-one-group"),
    pytest.param("deepseek_v3", {"tie_word_embeddings": True, **DENSE}, id="deepseek_v3-tied"),
    pytest.param("deepseek_v32", {"max_shard_size": "40KB"}, id="deepseek_v32-sharded"),
    pytest.param(
        "deepseek_v32",
        {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        id="deepseek_v32-dense-among-sparse",
    ),
    pytest.param("deepseek_v32", {"index_topk": 1, **DENSE}, id="deepseek_v32-one-token"),
    pytest.param("deepseek_v32", {"index_topk": 500, **DENSE}, id="deepseek_v32-all-tokens"),
]


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 160, (length,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """fp32 `[tokens, vocab]`: transformers' logits after each token."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    driver = StepDriver(tmp_path, page_size=16)
    long, short = prompt(90, 1), prompt(21, 2)
    want_long, want_short = reference(hf, long), reference(hf, short)

    # A whole prefill beside the first chunk of another, then that one's second chunk.
    first = driver.extend([(0, short[:17]), (1, long[:37])]).next_token_logits
    assert_close(first, torch.stack([want_short[16], want_long[36]]))
    second = driver.extend([(1, long[37:86])]).next_token_logits
    assert_close(second, want_long[85:86])
    # Decoding together: contexts of unlike length, in pages that alternate.
    for step in range(4):
        got = driver.decode([(1, long[86 + step]), (0, short[17 + step])]).next_token_logits
        assert_close(got, torch.stack([want_long[86 + step], want_short[17 + step]]))

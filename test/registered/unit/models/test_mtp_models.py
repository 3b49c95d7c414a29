"""The layer that drafts tokens (MTP): hidden states and logits equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rigs.drafts.draft_driver import (
    DraftDriver,
    Drafted,
    draft_reference,
    drafted_in_steps,
    rows_in_steps,
)
from rigs.models.model_oracle import assert_close, prompt, reference
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "glm_moe_dsa_shared",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
)
CASES: list[Any] = [
    *(pytest.param(family, {}, id=family) for family in FAMILIES),
    pytest.param("deepseek_v3", {"first_k_dense_replace": 2}, id="deepseek_v3-dense"),
    pytest.param("deepseek_v3", {"tie_word_embeddings": True}, id="deepseek_v3-tied"),
    pytest.param("qwen3_next", {"num_experts": 0, "max_shard_size": "60KB"}, id="qwen3_next-dense"),
    pytest.param("qwen3_5", {"tie_word_embeddings": True}, id="qwen3_5-tied"),
    pytest.param(
        "qwen3_5",
        {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "num_hidden_layers": 3},
        id="qwen3_5-three-layers",
    ),
]


def assert_equal(got: Drafted, want: Drafted) -> None:
    assert_close(got.hidden, want.hidden)
    assert_close(got.logits, want.logits)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_drafts_equal_transformers_in_chunks_and_decode_steps(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True, **overrides)
    long, short = prompt(82, 1), prompt(21, 2)
    got = drafted_in_steps(DraftDriver(tmp_path, page_size=16), long, short)
    assert_equal(got, rows_in_steps(draft_reference(hf, long), draft_reference(hf, short)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_of_three_drafts_equals_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True)
    tokens = prompt(47, 3)
    driver = DraftDriver(tmp_path, page_size=16)
    got = driver.chain(0, driver.run([(0, tokens)]), 3)
    want = draft_reference(hf, tokens, steps=3)
    assert len(got.hidden) == 46 + 2
    assert_equal(got, want)
    # The model's own words are those without a draft layer.
    assert_close(driver.decode([(0, 7)]).next_token_logits, reference(hf, [*tokens, 7])[-1:])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

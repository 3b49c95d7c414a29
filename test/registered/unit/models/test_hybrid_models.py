"""Hybrids with recurrent states: logits and words as transformers', in chunks, from snapshots,
in batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rigs.models.model_oracle import (
    assert_close,
    assert_continued,
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_in_chunks,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.published_configs import PUBLISHED
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

DENSE_NEXT = {"num_experts": 0, "max_shard_size": "60KB"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
KIMI_LAST_FULL = {
    "full_attn_layers": [3],
    "kda_layers": [1, 2],
    "head_dim": 32,
    "num_heads": 3,
    "short_conv_kernel_size": 2,
}
CASES = [
    pytest.param("qwen3_next", {}, id="next-experts"),
    pytest.param(
        "qwen3_next", {"mlp_only_layers": [0, 2], "attention_bias": True}, id="next-mixed"
    ),
    pytest.param(
        "qwen3_next", {"norm_topk_prob": False, "decoder_sparse_step": 2}, id="next-sparse"
    ),
    pytest.param("qwen3_next", {**DENSE_NEXT, "linear_conv_kernel_dim": 2}, id="next-dense"),
    pytest.param("qwen3_5", {"tie_word_embeddings": True}, id="3.5-tied"),
    pytest.param("qwen3_5", {"linear_num_value_heads": 2, "head_dim": 32}, id="3.5-equal-heads"),
    pytest.param(
        "qwen3_5",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        id="3.5-linear-layer-last",
    ),
    pytest.param("qwen3_5_moe", {}, id="3.5-experts"),
    pytest.param("qwen3_5_vision", {"max_shard_size": "60KB"}, id="3.5-beside-vision"),
    pytest.param("qwen3_5_vision", {"tie_word_embeddings": True}, id="3.5-beside-vision-tied"),
    pytest.param("qwen3_5_moe_vision", {}, id="3.5-experts-beside-vision"),
    pytest.param("qwen3_5_vision", {"rope_parameters": YARN}, id="3.5-beside-vision-yarn"),
    pytest.param("nemotron_h", {"chunk_size": 128, "max_shard_size": "60KB"}, id="nemotron"),
    pytest.param(
        "nemotron_h",
        {"moe_latent_size": None, "n_groups": 8, "conv_kernel": 2, "chunk_size": 16},
        id="nemotron-without-latent",
    ),
    pytest.param(
        "nemotron_h", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}, id="nemotron-groups"
    ),
    pytest.param(
        "nemotron_h",
        {"layers_block_type": ["full_attention", "linear_attention", "mlp"], "n_groups": 1},
        id="nemotron-dense-last",
    ),
    pytest.param(
        "nemotron_h",
        {"layers_block_type": ["mlp", "linear_attention", "full_attention"]},
        id="nemotron-attention-last",
    ),
    pytest.param(
        "nemotron_h",
        {"layers_block_type": ["full_attention", "moe", "linear_attention"]},
        id="nemotron-mamba-last",
    ),
    pytest.param("kimi_linear", {}, id="kimi"),
    pytest.param(
        "kimi_linear",
        {
            "q_lora_rank": 24,
            "attention_bias": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        id="kimi-query-latent-groups",
    ),
    pytest.param(
        "kimi_linear",
        {"moe_renormalize": False, "linear_attn_config": KIMI_LAST_FULL},
        id="kimi-published-order",
    ),
]


@pytest.mark.half
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], page_size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    driver = StepDriver(tmp_path, page_size=page_size)
    assert_logits_of_batches(hf, driver, cut=77, length=202)


@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        *(("qwen3_5", chunk) for chunk in (1, 3, 63, 64, 65, 100)),
        ("qwen3_5_moe_vision", 65),
        *(("nemotron_h", chunk) for chunk in (1, 63, 64, 100)),
        *(("kimi_linear", chunk) for chunk in (1, 63, 64, 65)),
    ],
)
def test_any_chunks_of_a_prompt_give_the_same_logits(
    tmp_path: Path, family: str, chunk: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    assert_logits_in_chunks(hf, StepDriver(tmp_path), prompt(140, 3), chunk)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_vision",
        "qwen3_5_moe_vision",
        "kimi_linear",
        "nemotron_h",
    ],
)
def test_greedy_words_equal_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, page_size=16)
    assert_greedy_words(hf, driver, prompt(70, 4), chunk=33)


@pytest.mark.parametrize(
    ("family", "at"),
    [
        *(("qwen3_5", at) for at in (1, 2, 63, 64, 65, 130, 149, 150)),
        *((family, at) for family in ("kimi_linear", "nemotron_h") for at in (2, 64, 149)),
    ],
)
def test_requests_continue_from_a_snapshot_of_a_prefill(
    tmp_path: Path, family: str, at: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, num_states=20)
    assert_continued(hf, driver, at, whole=150, ends=(151, 153, 160))


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next", "nemotron_h"])
def test_several_requests_leave_snapshots_in_one_prefill(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, num_states=20)
    prompts = [prompt(length, 7 + length) for length in (9, 200, 70)]
    want = [reference(hf, tokens) for tokens in prompts]
    at = (5, 128, 70)
    snapshots = {row: (17 + row, length) for row, length in enumerate(at)}
    driver.extend(list(enumerate(prompts)), snapshots)
    for row, length in enumerate(at[:2]):
        driver.continue_from(17 + row, row, [row + 4], length)
    got = driver.extend([(4, prompts[0][5:]), (5, prompts[1][128:])]).next_token_logits
    assert_close(got, torch.stack([want[0][-1], want[1][-1]]))
    pool = driver.runner.pools[PoolName.MAMBA]
    assert isinstance(pool, MambaPool)
    assert torch.equal(pool.temporal[:, 19], pool.temporal[:, 3])
    assert torch.equal(pool.conv[:, 19], pool.conv[:, 3])


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_5", "nemotron_h"])
def test_requests_continue_from_a_snapshot_of_decoding(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, num_states=20)
    tokens, other = prompt(50, 8), prompt(50, 9)
    want = reference(hf, tokens)
    driver.extend([(0, other[:40]), (1, tokens[:40])])
    for place in range(40, 50):
        snapshots = {1: (17, 0)} if place == 44 else None
        driver.decode([(0, other[place]), (1, tokens[place])], snapshots)
    driver.continue_from(17, 1, [2], 45)
    assert_close(driver.extend([(2, tokens[45:48])]).next_token_logits, want[47:48])
    assert_close(driver.decode([(2, tokens[48])]).next_token_logits, want[48:49])


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_states_of_two_bytes_follow_those_of_fp32(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    for ssm_dtype in ("float32", "bfloat16", "float16"):
        driver = StepDriver(tmp_path, ssm_dtype=ssm_dtype)
        assert_errs_like_bf16(hf, driver, prompt(120, 10), 70)
        pool = driver.runner.pools[PoolName.MAMBA]
        assert str(pool.dtype) == f"torch.{ssm_dtype}"


def test_experts_of_a_layer_in_two_tensors_as_they_are_published(tmp_path: Path) -> None:
    """The form that transformers computes with, and merges others into."""
    hf = save_tiny_checkpoint(tmp_path, "qwen3_5_moe_vision")
    tensors = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    assert_logits_of_batches(hf, StepDriver(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_5_vision", "qwen3_5_moe_vision"])
def test_tensors_beside_the_text_model_are_left_unread_by_name(tmp_path: Path, family: str) -> None:
    """Vision and prediction of several tokens are left unread; other tensors are refused."""
    hf = save_tiny_checkpoint(tmp_path, family)
    extra = tmp_path / "more.safetensors"
    save_file({"mtp.fc.weight": torch.zeros(1), "model.visual.x": torch.zeros(1)}, extra)
    tokens = prompt(9, 13)
    logits = StepDriver(tmp_path).extend([(0, tokens)]).next_token_logits
    assert_close(logits, reference(hf, tokens)[-1:])
    for name in ("model.norm.weight", "model.visuals.x", "visual.x", "model.language_model.mtp.x"):
        save_file({name: torch.zeros(96)}, extra)
        with pytest.raises(ValueError, match=f"tensor '{name}' has no place in Qwen3_5.*Cond"):
            StepDriver(tmp_path)


def test_a_checkpoint_of_nemotron_as_it_is_published(tmp_path: Path) -> None:
    """A letter for each layer, tensors of `backbone` and of each expert."""
    hf = save_tiny_checkpoint(tmp_path, "nemotron_h", chunk_size=128)
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        names = set(file.keys())
    parts = ("embeddings", "norm_f", "layers.0.mixer.conv1d", "layers.1.mixer.experts.7.up_proj")
    assert {f"backbone.{part}.weight" for part in parts} <= names
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layers_block_type"], config["mtp_layers_block_type"], config["dtype"]
    config |= {
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "hybrid_override_pattern": "ME*-ME", "num_hidden_layers": 6, "norm_eps": 1e-5,
        "rope_theta": 10000, "partial_rotary_factor": 1.0, "torch_dtype": "float32",
        "time_step_limit": [0.0, float("inf")],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=64), cut=140, length=330)


def test_layers_that_draft_tokens_are_left_unread_and_refused_by_name(tmp_path: Path) -> None:
    """transformers drops them, so nothing says what they compute."""
    hf = save_tiny_checkpoint(tmp_path, "nemotron_h", num_nextn_predict_layers=1)
    save_file({"mtp.layers.0.norm.weight": torch.zeros(96)}, tmp_path / "more.safetensors")
    tokens = prompt(9, 13)
    logits = StepDriver(tmp_path).extend([(0, tokens)]).next_token_logits
    assert_close(logits, reference(hf, tokens)[-1:])
    with pytest.raises(ValueError, match="NemotronHForCausalLM has no layer that drafts tokens"):
        StepDriver(tmp_path, has_draft_layer=True)


def test_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    """Names of tensors and fields are its publisher's; transformers writes further fields."""
    hf = save_tiny_checkpoint(tmp_path, "kimi_linear", dtype=torch.bfloat16)
    names = load_file(tmp_path / "model.safetensors").keys()
    linear = "A_log dt_bias q_conv1d.weight k_conv1d.weight v_conv1d.weight o_norm.weight " + (
        " ".join(f"{name}_proj.weight" for name in "q k v b f_a f_b g_a g_b o".split())
    )
    assert {f"model.layers.0.self_attn.{name}" for name in linear.split()} <= names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    block = "model.layers.2.block_sparse_moe"
    for name in ("gate.weight", "gate.e_score_correction_bias", "experts.7.w1.weight",
                 "experts.7.w2.weight", "shared_experts.down_proj.weight"):  # fmt: skip
        assert f"{block}.{name}" in names
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    config = {name: raw[name] for name in PUBLISHED["Kimi-Linear-48B-A3B"].config if name in raw}
    path.write_text(json.dumps(config | {
        "first_k_dense_replace": 1, "head_dim": 18, "mla_use_nope": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0,
        "rope_scaling": None, "rope_theta": 10000.0, "use_grouped_topk": True,
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    }))  # fmt: skip
    assert "layer_types" not in config and "linear_head_dim" not in config
    assert_logits_of_batches(torch.nn.Module.float(hf), StepDriver(tmp_path, dtype="float32"))


def test_latent_attention_without_rotation_cannot_be_scaled(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "kimi_linear")
    path = tmp_path / "config.json"
    scaling = {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    with pytest.raises(ValueError, match="rope_scaling of type 'linear': Kimi-Linear"):
        StepDriver(tmp_path)


def test_padding_is_no_state(tmp_path: Path) -> None:
    """If no request leaves a snapshot, only the running states are written."""
    save_tiny_checkpoint(tmp_path, "qwen3_5")
    driver = StepDriver(tmp_path, num_states=20)
    driver.extend([(0, prompt(30, 11)), (3, prompt(3, 12))])
    driver.decode([(0, 5)])
    pool = driver.runner.pools[PoolName.MAMBA]
    assert isinstance(pool, MambaPool)
    written = pool.temporal.abs().sum(dim=(0, 2, 3, 4)).nonzero().flatten().tolist()
    assert written == [1, 4]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "sizes of linear attention are too small"),
        ("qwen3_5", {"linear_key_head_dim": 0}, "linear_key_head_dim=0 must be a positive integer"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "at least one with full_attention"),
        ("qwen3_5_moe", {"num_experts_per_tok": 9}, "config.json: a token cannot use 9 of 4"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads=8 must be a multiple of n_groups=3"),
        ("nemotron_h", {"chunk_size": 100}, "chunk_size=100 must be one of 16, 32, 64, 128"),
        ("nemotron_h", {"conv_kernel": 1}, "conv_kernel=1 must be at least 2"),
        ("nemotron_h", {"mamba_head_dim": 0}, "mamba_head_dim=0 must be a positive integer"),
        ("nemotron_h", {"num_hidden_layers": 7}, "must name all 7 layers"),
        (
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "mlp"]},
            "layers_block_type ['linear_attention', 'mlp'] must name all 2 layers, and at least",
        ),
        ("nemotron_h", {"layers_block_type": ["full_attention"]}, "names no linear_attention"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size=0 must be a positive integer"),
        ("nemotron_h", {"num_experts_per_tok": 9}, "config.json: a token cannot use 9 of 8"),
        (
            "qwen3_next",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "partial_rotary_factor=1.5 in config.json must be above 0",
        ),
    ],
)
def test_what_config_json_contradicts_is_said(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    save_tiny_checkpoint(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=re.escape(message)):
        StepDriver(tmp_path)

"""Models with experts: logits and words equal transformers' on the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.model_oracle import (
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_of_batches,
    prompt,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

FAMILY = "qwen3_moe"
CASES = [
    pytest.param({}, id="qwen3-moe"),
    pytest.param({"norm_topk_prob": False, "attention_bias": True}, id="not-normalized-biases"),
    pytest.param({"num_experts_per_tok": 1, "tie_word_embeddings": True}, id="one-expert-tied"),
    pytest.param({"num_experts_per_tok": 8}, id="all-experts"),
    pytest.param({"num_hidden_layers": 3, "mlp_only_layers": [1]}, id="dense-among-sparse"),
    pytest.param({"num_hidden_layers": 4, "decoder_sparse_step": 2}, id="every-second-sparse"),
    pytest.param({"max_shard_size": "60KB"}, id="sharded"),
]
GLM4 = [
    pytest.param({}, id="glm4-moe"),
    pytest.param({"use_qk_norm": False, "attention_bias": False}, id="no-norms-no-biases"),
    pytest.param({"norm_topk_prob": False, "n_group": 1, "topk_group": 1}, id="one-group"),
    pytest.param({"first_k_dense_replace": 0, "n_shared_experts": 2}, id="all-sparse"),
    pytest.param(
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        id="a-quarter-rotates",
    ),
]
MINIMAX = [
    pytest.param({}, id="minimax-m2"),
    pytest.param({"rms_norm_eps": 0.5}, id="large-epsilon"),
    pytest.param(
        {"rope_parameters": {"rope_theta": 500.0}, "num_key_value_heads": 6}, id="all-rotate-mha"
    ),
    pytest.param({"num_experts_per_tok": 8, "tie_word_embeddings": True}, id="all-experts-tied"),
]
EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overrides", CASES)
def test_logits_equal_transformers(
    tmp_path: Path, overrides: dict[str, Any], page_size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, FAMILY, **overrides)
    driver = StepDriver(tmp_path, page_size=page_size)
    assert_logits_of_batches(hf, driver)


@pytest.mark.parametrize("overrides", GLM4)
def test_logits_of_glm4_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, "glm4_moe", **overrides)
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overrides", MINIMAX)
def test_logits_of_minimax_equal_transformers(
    tmp_path: Path, overrides: dict[str, Any], page_size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, "minimax_m2", **overrides)
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=page_size))


@pytest.mark.parametrize("family", [FAMILY, "glm4_moe", "minimax_m2"])
def test_128_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, eos_token_id=None)
    driver = StepDriver(tmp_path, page_size=16)
    assert_greedy_words(hf, driver, prompt(20, 3))


@pytest.mark.parametrize("family", [FAMILY, "glm4_moe", "minimax_m2"])
def test_bf16_errs_like_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    driver = StepDriver(tmp_path, page_size=16)
    assert_errs_like_bf16(hf, driver, prompt(120, 3), 40)


@pytest.mark.parametrize(
    ("overrides", "sparse"),
    [
        ({"num_hidden_layers": 4}, [0, 1, 2, 3]),
        ({"num_hidden_layers": 4, "mlp_only_layers": [0, 3]}, [1, 2]),
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2}, [1, 3]),
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
    ],
)
def test_which_layers_are_sparse(
    tmp_path: Path, overrides: dict[str, Any], sparse: list[int]
) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY, **overrides)
    model = StepDriver(tmp_path).runner.model
    assert isinstance(model, torch.nn.Module)
    names = [name for name, part in model.named_modules() if isinstance(part, SparseMoeBlock)]
    assert names == [f"model.layers.{i}.mlp" for i in sparse]


def test_warm_prompts_give_the_words_of_cold_ones(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY, eos_token_id=None)
    ids = prompt(90, 5)
    prompts = [ids, ids[:50] + prompt(30, 6)]
    cold = SchedulerRig(tmp_path, page_size=16, disable_radix_cache=True).generate(prompts, 16)
    rig = SchedulerRig(tmp_path, page_size=16)
    assert rig.generate([ids], 16) == cold[:1]
    for _ in range(2):
        assert rig.generate(prompts, 16) == cold
    *_, first, _ = rig.results.values()
    assert first.last is not None
    assert first.last.cached_tokens_details.device == 80, "pages of the prompt were computed again"


def load(path: Path, load_format: str = "auto", rank: int = 0, size: int = 1) -> dict[str, Any]:
    model = get_model(
        ModelConfig.from_path(str(path)),
        LoadConfig(load_format=load_format, tp_group=PlaceInGroup(rank, size), show_progress=False),
    )
    return {name: slot.dest for name, slot in model.weight_slots()}


def stack_experts(path: Path) -> dict[str, torch.Tensor]:
    """Write the experts of each layer as two tensors, as some checkpoints have them."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"

        def all_of(name: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(8)])

        gate_up = torch.cat([all_of("gate"), all_of("up")], dim=1)
        tensors[f"{prefix}.gate_up_proj"] = gate_up
        tensors[f"{prefix}.down_proj"] = all_of("down")
    save_file(tensors, file)
    return tensors


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_stacked_experts_are_the_same_weights(tmp_path: Path, rank: int, size: int) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY)
    want = load(tmp_path, rank=rank, size=size)
    stack_experts(tmp_path)
    got = load(tmp_path, rank=rank, size=size)
    assert set(got) == set(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_of_every_expert(tmp_path: Path, rank: int) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY)
    whole, part = load(tmp_path), load(tmp_path, rank=rank, size=2)
    for expert in range(8):
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            key = f"{EXPERT}.{expert}.{name}.weight"
            assert torch.equal(part[key], whole[key].chunk(2, dim)[rank])
    assert torch.equal(
        part["model.layers.1.mlp.gate.weight"], whole["model.layers.1.mlp.gate.weight"]
    )


def refusal(path: Path, changes: dict[str, torch.Tensor | None]) -> str:
    """The error of loading with tensors replaced, added or (None) removed."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY)
    name, other = f"{EXPERT}.7.up_proj.weight", f"{EXPERT}.8.up_proj.weight"
    tensor = load_file(tmp_path / "model.safetensors")[name]
    message = refusal(tmp_path, {name: None})
    assert f"'{name}' is in no weight file (1 of " in message
    message = refusal(tmp_path, {name: tensor, other: tensor.clone()})
    assert f"'{other}' has no place in Qwen3MoeForCausalLM" in message
    message = refusal(tmp_path, {other: None, name: tensor[:, 1:].contiguous()})
    assert f"'{name}' has shape [64, 95], config.json asks for [64, 96]" in message
    shared = "model.layers.1.mlp.shared_expert.up_proj.weight"
    assert f"'{shared}' has no place" in refusal(tmp_path, {name: tensor, shared: tensor.clone()})


def test_wrong_stacked_tensors_are_named(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY)
    single = f"{EXPERT}.2.down_proj.weight"
    tensor = load_file(tmp_path / "model.safetensors")[single]
    stacked = stack_experts(tmp_path)
    down, gate_up = f"{EXPERT}.down_proj", f"{EXPERT}.gate_up_proj"
    assert "is there twice" in refusal(tmp_path, {single: tensor})
    message = refusal(tmp_path, {single: None, down: stacked[down][1:].contiguous()})
    assert f"'{down}' has shape [7, 96, 64], config.json asks for [8, 96, 64]" in message
    message = refusal(tmp_path, {down: stacked[down], gate_up: None})
    assert f"'{EXPERT}.0.gate_proj.weight' is in no weight file (16 of " in message


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, FAMILY)
    (tmp_path / "model.safetensors").unlink()
    weights = load(tmp_path, "dummy")
    first, second = (weights[f"{EXPERT}.{i}.up_proj.weight"] for i in (0, 1))
    assert first.std() > 0.05 and not torch.equal(first, second)
    driver = StepDriver(tmp_path, load_format="dummy")
    logits = driver.extend([(0, prompt(30, 1))]).next_token_logits
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        (FAMILY, "num_experts_per_tok", 9, "config.json: a token cannot use 9 of 8 experts"),
        (FAMILY, "decoder_sparse_step", 0, "config.json: decoder_sparse_step=0"),
        (FAMILY, "moe_intermediate_size", 0, "config.json: moe_intermediate_size=0"),
        ("minimax_m2", "num_experts_per_tok", 9, "^config.json: a token cannot use 9 of 8 experts"),
        ("minimax_m2", "num_local_experts", 0, "^config.json: num_local_experts=0"),
        ("minimax_m2", "rotary_dim", 6, "rotary_dim=6 contradicts partial_rotary_factor=0.5 of"),
        ("glm4_moe", "head_dim", 18, "partial_rotary_factor=0.5 of head_dim=18 must be an even"),
        ("minimax_m2", "head_dim", 2, "partial_rotary_factor=0.5 of head_dim=2 must be an even"),
    ],
)  # fmt: skip
def test_configs_that_make_no_sense_are_refused(
    tmp_path: Path, family: str, field: str, value: int, message: str
) -> None:
    save_tiny_checkpoint(tmp_path, family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)

"""Weights of the layer that drafts tokens (MTP): formats, ranks, copies, and refusals."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.drafts.draft_driver import DraftDriver
from rigs.models.model_oracle import prompt
from rigs.models.quantized_checkpoints import awq, fp8_blocks, write_quantized
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

DRAFT_FILE = "model-draft.safetensors"
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(file: Path, change: Any) -> None:
    """Write a file again, with the tensors that `change` makes of its tensors."""
    save_file(change(load_file(file)), file)


def weights(path: Path, rank: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    """The parameters of one rank."""
    load_config = LoadConfig(tp_group=PlaceInGroup(rank, size), show_progress=False)
    model = get_model(ModelConfig.from_path(str(path), has_draft_layer=True), load_config)
    return {name: weight.data for name, weight in model.named_parameters()}


@pytest.mark.parametrize("make_format", [fp8_blocks, awq])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5_moe"])
def test_every_rank_has_the_values_that_a_format_stands_for(
    tmp_path: Path, family: str, make_format: Any
) -> None:
    save_tiny_checkpoint(tmp_path / "made", family, mtp=True)
    path = write_quantized(tmp_path / "made", tmp_path, make_format())
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        got, want = weights(path, rank, size), weights(tmp_path / "plain", rank, size)
        assert any(name.startswith("draft_layer.layer.mlp") for name in got)
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "qwen3_5_moe_vision"])
def test_each_tensor_is_loaded_once_and_copies_are_not(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    tensors = {**load_file(tmp_path / "model.safetensors"), **load_file(tmp_path / DRAFT_FILE)}
    is_read = {
        name: not name.startswith("model.visual.")
        and not name.endswith(tuple(f"layers.2.{copy}" for copy in COPIES))
        for name in tensors
    }
    want = sum(tensor.nbytes for name, tensor in tensors.items() if is_read[name])
    assert StepDriver(tmp_path, has_draft_layer=True).runner.weight_bytes() == want


def test_a_layer_more_is_kept_of_each_token(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v32", mtp=True)
    sizes = [
        StepDriver(tmp_path, has_draft_layer=has).runner.kv_bytes_per_token()
        for has in (False, True)
    ]
    row, key = (32 + 8) * 4, 24 * 4
    assert sizes == [2 * (row + key), 3 * (row + key)]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_dummy_weights_need_no_files(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    logits = DraftDriver(tmp_path, load_format="dummy").run([(0, prompt(30, 1))]).logits
    assert logits.isfinite().all() and not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_pages_with_and_without_its_state_are_not_mixed_up(
    tmp_path: Path, load_format: str
) -> None:
    """Stores and other servers know the weights by their identity."""
    save_tiny_checkpoint(tmp_path, "qwen3_5", mtp=True)
    found = [
        StepDriver(
            tmp_path, has_draft_layer=has, load_format=load_format
        ).runner.weight_source.identity()
        for has in (False, True, True)
    ]
    assert found[0] != found[1] == found[2]


def test_only_the_first_of_several_layers_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for family, name, count in (
        ("deepseek_v3", "model.layers.3.eh_proj.weight", "num_nextn_predict_layers"),
        ("qwen3_5", "mtp.layers.1.self_attn.q_proj.weight", "mtp_num_hidden_layers"),
    ):
        path = tmp_path / family
        save_tiny_checkpoint(path, family, mtp=True)
        save_file({name: torch.ones(3)}, path / "more.safetensors")
        with pytest.raises(ValueError, match=f"'{name}' has no place"):
            StepDriver(path, has_draft_layer=True)
        change_config(path, **{count: 2})
        caplog.clear()
        with caplog.at_level(logging.INFO):
            StepDriver(path, has_draft_layer=True)
        assert f"{count}=2: the first layer that drafts tokens is loaded" in caplog.text
        StepDriver(path)


def test_a_number_of_layers_that_is_left_out_is_one(tmp_path: Path) -> None:
    """Qwen3-Next's config.json leaves it out."""
    save_tiny_checkpoint(tmp_path, "qwen3_next", mtp=True)
    change_config(tmp_path, mtp_num_hidden_layers=None)
    for has_draft_layer in (True, False):
        StepDriver(tmp_path, has_draft_layer=has_draft_layer)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_5_vision"])
def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True)
    file = tmp_path / DRAFT_FILE
    lost = next(name for name in load_file(file) if name.endswith("o_proj.weight"))
    change_tensors(file, lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    line = (
        f"{type(hf).__name__} has no whole layer that drafts tokens: tensor '{{}}' is in no weight "
        "file ({} of "
    )
    with pytest.raises(ValueError, match=re.escape(line.format(lost, 1))) as caught:
        StepDriver(tmp_path, has_draft_layer=True)
    assert str(caught.value).endswith("are missing): remove --speculative-algorithm")
    StepDriver(tmp_path)
    # More than that layer is missing.
    change_tensors(
        tmp_path / "model.safetensors",
        lambda tensors: {k: v for k, v in tensors.items() if not k.endswith("o_proj.weight")},
    )
    with pytest.raises(ValueError, match=r"are missing\): copy the checkpoint again$"):
        StepDriver(tmp_path, has_draft_layer=True)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3_moe",
        "deepseek_v2",
        "kimi_k25_vision",
        "kimi_linear",
        "minimax_m2",
        "ministral",
        "gpt_oss",
    ],
)
def test_families_without_such_a_layer_are_refused_by_name(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    message = (
        f"--speculative-algorithm: {type(hf).__name__} has no layer that drafts tokens; supported "
        "are DeepseekV32ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, "
        "Glm4MoeLiteForCausalLM, GlmMoeDsaForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, "
        "Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM, "
        "Qwen3_5MoeForConditionalGeneration: remove --speculative-algorithm"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ModelConfig.from_path(str(tmp_path), has_draft_layer=True)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("glm4_moe", {}, "num_nextn_predict_layers=0: the checkpoint has no layer"),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0: the checkpoint"),
        ("qwen3_next", {"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers=True: the"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
    ],
)
def test_what_config_json_says_is_refused_in_one_line(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    save_tiny_checkpoint(tmp_path, family)
    change_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_path(str(tmp_path), has_draft_layer=True)
    assert str(caught.value).endswith(": remove --speculative-algorithm")
    assert "\n" not in str(caught.value)
    ModelConfig.from_path(str(tmp_path))

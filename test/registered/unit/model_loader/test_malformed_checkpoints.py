"""Malformed checkpoints end in one line that names the field, the file or the tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.checkpoints.malformed import (
    assert_told,
    malformed_configs,
    malformed_tensors,
    refusal_of,
)
from rigs.models.quantized_checkpoints import Format, awq, fp8_blocks, gptq, write_quantized
from rigs.models.tiny_models import tiny_config
from sglang.hicache_plan import main
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.start_checks import check_model
from sglang.srt.model_loader.weight_files import weight_files
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import check_tokenizer_files
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

LAYER = "model.layers.0.mlp.down_proj"
LONG = "a" * 300
DEEP: Any = json.loads("[" * 40 + "]" * 40)


def config_alone(path: Path, family: str) -> Path:
    """A checkpoint without weights."""
    architectures = {
        "llama": "LlamaForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "ministral": "MinistralForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_5_moe_vision": "Qwen3_5MoeForConditionalGeneration",
    }
    config = tiny_config(family)
    config.architectures = [architectures[family]]
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize(
    "family", ["llama", "ministral", "gpt_oss", "deepseek_v32", "qwen3_5_moe_vision", "nemotron_h"]
)
def test_random_fields_are_named(tmp_path: Path, family: str) -> None:
    path = config_alone(tmp_path, family)
    results = [assert_told(one, loads=False) for one in malformed_configs(path, seed=3, share=0.03)]
    assert len(set(results)) == 2, "some are read and some are not"


@pytest.mark.parametrize("make", [fp8_blocks, awq, gptq])
def test_random_tensors_are_named(plain: Path, tmp_path: Path, make: Callable[[], Format]) -> None:
    path = write_quantized(plain, tmp_path, make())
    results = [assert_told(one, loads=True) for one in malformed_tensors(path, seed=5, share=0.15)]
    assert len(set(results)) == 2, "some are read and some are not"


def change(path: Path, name: str, value: object) -> None:
    """Change a field of config.json; a dot leads into an object."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    *before, last = name.split(".")
    inner = config
    for key in before:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(config))


def planned(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of `sglang.hicache_plan` for a checkpoint."""
    assert main(["--model-path", str(path), "--machine", "h200"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("family", "field", "value", "words"),
    [
        ("llama", "dtype", [], "dtype=[] must be"),
        ("llama", "dtype", 0, "dtype=0 must be"),
        ("llama", "model_type", ["llama"], "model_type=['llama'] is not that of"),
        ("llama", "architectures", {"a": 1}, "architectures {'a': 1}"),
        ("llama", "hidden_size", 1 << 63, "hidden_size is above 9223372036854775807"),
        ("llama", "vocab_size", 1 << 40, "vocab_size=1099511627776 must be a positive integer, at"),
        ("llama", "num_hidden_layers", 1 << 40, "num_hidden_layers=1099511627776 must be an"),
        ("llama", "num_key_value_heads", 0, "num_key_value_heads=0 must be a positive integer"),
        ("llama", "head_dim", "x", "head_dim='x' must be an integer from 1 to 65536"),
        ("llama", "num_attention_heads", 0, "num_attention_heads=0 must be an integer from 1"),
        ("llama", "rope_parameters.rope_theta", [1], "rope_theta=[1] in config.json must be a"),
        ("llama", "rope_parameters", DEEP, "more than 32 levels"),
        ("llama", "intermediate_size", (1 << 31) - 1, None),
        ("deepseek_v32", "num_nextn_predict_layers", "x", "num_nextn_predict_layers='x' must be"),
        ("deepseek_v32", "n_shared_experts", -1, "n_shared_experts=-1 must be an integer from 0"),
        (
            "nemotron_h",
            "layers_block_type",
            "mlp",
            "Field 'layers_block_type' expected a list, got str",
        ),
        ("nemotron_h", "ssm_state_size", [], "Field 'ssm_state_size' expected int, got list"),
        ("qwen3_5_moe_vision", "text_config.num_experts", 1 << 40, "text_config.num_experts=109"),
        ("qwen3_5_moe_vision", "text_config.model_type", [], "text_config.model_type=[] is not"),
    ],
)
def test_a_malformed_field_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    field: str,
    value: object,
    words: str | None,
) -> None:
    path = config_alone(tmp_path, family)
    change(path, field, value)
    error = refusal_of(path, loads=False)
    if words is None:
        assert error is None
        return
    assert error is not None and words in error and "\n" not in error
    assert words in planned(path, capsys)


def test_impossible_products_of_sizes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_alone(tmp_path, "deepseek_v32")
    for field in ("vocab_size", "moe_intermediate_size", "n_routed_experts", "hidden_size"):
        change(path, field, {"n_routed_experts": 1 << 14, "hidden_size": 1 << 24}.get(field, 2**30))
    change(path, "n_group", 1)
    change(path, "topk_group", 1)
    error = planned(path, capsys)
    assert "a weight of model." in error and "check the sizes in config.json" in error


@pytest.mark.parametrize(
    ("make", "field", "value", "words"),
    [
        (gptq, "dynamic", 7, "quantization_config.dynamic=7 is not supported"),
        (gptq, "group_size", 10**30, "quantization_config.group_size is above"),
        (awq, "group_size", 1 << 40, "quantization_config.group_size=1099511627776"),
        (fp8_blocks, "weight_block_size", [128, 1 << 63], "weight_block_size.1 is above"),
        (fp8_blocks, "modules_to_not_convert", 7, "modules_to_not_convert=7"),
        (fp8_blocks, "ignore", ["re:("], "ignore has 're:(', which is no regular expression"),
    ],
)
def test_a_malformed_weight_format_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[], Format],
    field: str,
    value: object,
    words: str,
) -> None:
    path = config_alone(tmp_path, "llama")
    change(path, "dtype", "bfloat16")
    change(path, "quantization_config", {**make().config, field: value})
    assert words in planned(path, capsys)


@pytest.mark.parametrize(
    ("make", "tensor", "changed", "words"),
    [
        (gptq, "qweight", torch.ones(16, 96), "elements of F32 must be I32"),
        (gptq, "qweight", torch.ones(5, dtype=torch.int32), r"has shape \[5\], config.json asks"),
        (gptq, "qzeros", torch.ones(5, dtype=torch.int32), r"two dimensions, not torch.int32 \[5"),
        (gptq, "scales", torch.ones(4, 96, 1), r"scales \[4, 96, 1\] must be \[96, 4\]"),
        (gptq, "g_idx", torch.ones(0, dtype=torch.int32), "groups must name one of 4 groups"),
        (awq, "scales", torch.ones(()), r"scales \[\] must be"),
        (fp8_blocks, "weight_scale_inv", torch.ones(0), r"scales \[0\] do not fit"),
        (fp8_blocks, "weight_scale_inv", torch.ones(1, 1, 1), r"scales \[1, 1, 1\] do not fit"),
    ],
)
def test_a_malformed_tensor_is_named(
    plain: Path,
    tmp_path: Path,
    make: Callable[[], Format],
    tensor: str,
    changed: torch.Tensor,
    words: str,
) -> None:
    path = write_quantized(plain, tmp_path, make())
    file = path / "model.safetensors"
    save_file({**load_file(file), f"{LAYER}.{tensor}": changed}, file)
    error = refusal_of(path, loads=True)
    assert error is not None and re.search(words, error) and LAYER in error


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (f"{'[' * 200_000}{']' * 200_000}", "cannot be read as JSON"),
        (f'{{"weight_map": {"[" * 40}{"]" * 40}}}', "more than 32 levels"),
        ('{"weight_map": {"x": ["a"]}}', "not a valid index: weight_map must have the file"),
        ("[]", "must hold a JSON object"),
        (json.dumps({"weight_map": {"x": LONG}}), "is missing though model.safetensors.index.json"),
        (json.dumps({"weight_map": {"x": "a\0b"}}), "is missing though model.safetensors.index"),
    ],
)
def test_a_malformed_index_is_named(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        weight_files(tmp_path, "auto")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", [LONG, f"/tmp/{LONG}", "a\0b"])
def test_a_malformed_path_is_named(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for read in (ModelConfig.from_path, check_tokenizer_files):
        with pytest.raises(ValueError, match=r"path .* is not a directory: give"):
            read(path)
    with pytest.raises(ValueError, match="is not a directory"):
        check_model(ServerArgs(model_path=path))
    assert "is not a directory: give" in planned(Path(path), capsys)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_deeply_nested_file_is_named(tmp_path: Path, name: str) -> None:
    path = config_alone(tmp_path, "llama")
    for depth in (40, 900, 5000):
        (path / name).write_text(f'{{"a": {"[" * depth}{"]" * depth}}}')
        error = refusal_of(path, loads=False)
        assert error is not None and name in error and "\n" not in error

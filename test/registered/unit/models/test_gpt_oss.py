"""gpt-oss: logits as transformers' around the window, and settings that are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rigs.models.model_oracle import (
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_around,
    assert_logits_of_batches,
    prompt,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint, tiny_config
from sglang.srt.configs.model_config import RING_BYTES, ModelConfig
from sglang.srt.configs.quantization_config import AT_LOAD
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention_kind import SLIDING_WINDOW
from sglang.srt.layers.rotary_embedding import inverse_frequencies
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.srt.model_loader.loader import build_model, get_model
from sglang.srt.model_loader.rounded_weights import is_rounded
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

WINDOW = 128
PUBLISHED_ROTATION = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
SINKS = "model.layers.1.self_attn.sinks"


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model with the published window, longest context and rotation."""
    path = tmp_path_factory.mktemp("gpt_oss")
    return path, save_tiny_checkpoint(
        path, "gpt_oss", sliding_window=WINDOW, max_position_embeddings=131072,
        rope_parameters=PUBLISHED_ROTATION, eos_token_id=None,
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_logits_around_the_window_equal_transformers(
    model: tuple[Path, PreTrainedModel], length: int
) -> None:
    """The whole prompt at once, in chunks that begin within windows, and one word after it."""
    path, hf = model
    cuts = (1, 100, 127, 128, 300, 555)
    assert_logits_around(hf, StepDriver(path, page_size=16), length, cuts, words=1)


def test_words_beyond_the_window_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    path, hf = model
    assert_greedy_words(hf, StepDriver(path, page_size=16), prompt(70, 4), count=130, chunk=33)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="tiny"),
        pytest.param({"attention_bias": False}, id="no-attention-bias"),
        pytest.param({"num_experts_per_tok": 8, "swiglu_alpha": 0.7}, id="all-experts"),
        pytest.param({"layer_types": ["full_attention"] * 4}, id="no-window"),
        pytest.param(
            {"layer_types": ["full_attention", "sliding_attention"] * 2}, id="window-last"
        ),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"max_shard_size": "60KB"}, id="shards"),
    ],
)
def test_logits_of_batches_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, "gpt_oss", **overrides)
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


def test_bf16_errs_like_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    assert_errs_like_bf16(hf, StepDriver(tmp_path, page_size=16), prompt(120, 3), 40)


def test_each_head_reads_its_own_sink(tmp_path: Path) -> None:
    """A sink far above all scores takes the whole softmax, and its head adds nothing."""
    hf = save_tiny_checkpoint(tmp_path, "gpt_oss")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("sinks"):
            tensor[:4], tensor[4:] = 60.0, -60.0
    save_file(tensors, file, {"format": "pt"})
    hf.load_state_dict(tensors)
    assert_logits_of_batches(hf, StepDriver(tmp_path))


def test_sinks_are_in_fp32_whatever_the_dtype(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    config = ModelConfig.from_path(str(tmp_path))
    layers = list(get_model(config, LoadConfig(show_progress=False)).attention_layers())
    assert [layer.kind == SLIDING_WINDOW for layer in layers] == [True, False] * 2
    stored = load_file(tmp_path / "model.safetensors")[SINKS]
    assert stored.dtype == torch.bfloat16
    assert layers[1].sinks is not None and torch.equal(layers[1].sinks, stored.float())


def test_rotation_is_that_of_yarn_without_truncation(model: tuple[Path, PreTrainedModel]) -> None:
    """Bounds by the method's formula: 8.09 and 17.40 of 32 pairs for heads of 64."""
    path, _ = model
    config = ModelConfig.from_path(str(path))
    assert config.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
    first, last = (
        32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32.0, 1.0)
    )
    assert [first, last] == pytest.approx([8.09, 17.40], abs=0.01)
    found = inverse_frequencies(config.rope, config.head_dim)
    assert len(found) == 8
    pairs = torch.arange(8, dtype=torch.float64)
    slowed = ((pairs - first / 4) / (last / 4 - first / 4)).clamp(0, 1)
    plain = 150000.0 ** (-pairs / 8)
    want = plain / 32 * slowed + plain * (1 - slowed)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0.0)


def test_a_backend_without_sinks_is_refused_at_the_start(
    model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_registry, "_TAKE_SINKS", set())
    with pytest.raises(ValueError, match="'torch_native' does not support attention sinks"):
        StepDriver(model[0])


def test_a_router_is_not_rounded() -> None:
    """Formats leave the choice of experts as it is."""
    assert is_rounded("model.layers.0.mlp.experts.gate_up_proj", AT_LOAD)
    assert not is_rounded("model.layers.0.mlp.router.weight", AT_LOAD)


def test_quantized_weights_say_no_dtype(tmp_path: Path) -> None:
    """A config without a dtype has that of the first weight that is not quantized."""
    config = tiny_config("gpt_oss", architectures=["GptOssForCausalLM"])
    config.save_pretrained(tmp_path)
    tensors = {"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert ModelConfig.from_path(str(tmp_path)).dtype == torch.bfloat16


def config_with(path: Path, **changes: Any) -> ModelConfig:
    config = tiny_config("gpt_oss", architectures=["GptOssForCausalLM"])
    config.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return ModelConfig.from_path(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 0}, "^config.json: sliding_window=0 must be a positive integer"),
        ({"sliding_window": None}, "^config.json: sliding_window=None must be a positive integer"),
        ({"num_hidden_layers": 3}, r"`num_hidden_layers` \(3\) must be equal to .*`layer_types`"),
        ({"layer_types": ["full_attention", "chunked"] * 2}, "layer_types='chunked' is not"),
        ({"layer_types": ["sliding_attention"] * 4}, "window of 12 tokens.*--context-length 12"),
        ({"num_local_experts": 0}, "^config.json: num_local_experts=0 must be a positive integer"),
        ({"num_experts_per_tok": 9}, "^config.json: a token cannot use 9 of 8 experts"),
        ({"swiglu_limit": 0.0}, "^config.json: swiglu_limit=0.0 must be a positive number"),
        ({"swiglu_alpha": -1.0}, "^config.json: swiglu_alpha=-1.0 must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for GptOss"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "method fp8: the experts of GptOssForCausalLM have biases, .*mxfp4 take: serve",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_model(config_with(tmp_path, **changes), LoadConfig())


def test_fp8_at_load_is_refused(model: tuple[Path, PreTrainedModel]) -> None:
    config = ModelConfig.from_path(str(model[0]), quantization="fp8")
    with pytest.raises(ValueError, match=r"^--quantization fp8: the experts of GptOssForCausalLM"):
        build_model(config, LoadConfig())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (SINKS, (5,)),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 256, 96)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (8, 128)),
        ("model.layers.3.mlp.experts.down_proj", (7, 128, 96)),
        ("model.layers.3.mlp.experts.down_proj_bias", (8, 97)),
        ("model.layers.2.mlp.router.bias", (7,)),
    ],
)
def test_tensors_of_other_shapes_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    save_tiny_checkpoint(tmp_path, "gpt_oss")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    wanted = list(tensors[name].shape)
    save_file({**tensors, name: torch.zeros(shape)}, file, {"format": "pt"})
    config = ModelConfig.from_path(str(tmp_path))
    with pytest.raises(ValueError) as told:
        get_model(config, LoadConfig(show_progress=False))
    words = f"tensor {name!r} has shape {list(shape)}, config.json asks for {wanted}"
    assert words in str(told.value)


@pytest.mark.parametrize("family", ["gpt_oss", "ministral"])
def test_windows_have_a_bound(tmp_path: Path, family: str) -> None:
    """Two layers, keys and values of 2 heads of 16 in fp32: 512 bytes a token."""
    most = RING_BYTES // 512
    shape: dict[str, Any] = {"max_position_embeddings": 1 << 20, "sliding_window": most}
    save_tiny_checkpoint(tmp_path, family, **shape)
    assert ModelConfig.from_path(str(tmp_path)).sliding_window == most
    file = tmp_path / "config.json"
    for window, remedy in (
        (most + 1, "--dtype bfloat16"),
        (2 * most + 1, f"--context-length {2 * most + 1}, up to which windows change nothing"),
    ):
        file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": window}))
        with pytest.raises(ValueError) as told:
            ModelConfig.from_path(str(tmp_path))
        assert str(told.value) == (
            f"config.json: sliding_window={window} in 2 layers takes {512 * window} bytes for each "
            f"prefix, more than the 8388608 that are supported: give {remedy}"
        )
        ModelConfig.from_path(str(tmp_path), context_length=window)
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": most + 1}))
    assert ModelConfig.from_path(str(tmp_path), dtype="bfloat16").sliding_window == most + 1


def test_the_gate_is_the_familys_if_the_configuration_lacks_it(tmp_path: Path) -> None:
    """As with transformers 5.17. Published checkpoints lack alpha, too."""
    config = config_with(tmp_path)
    for name in ("swiglu_limit", "swiglu_alpha"):
        delattr(config.hf_config, name)
    found = GptOssForCausalLM.decoder_options(config).sparse
    assert found is not None and found.activation == ClampedGate(limit=7.0, alpha=1.702, shift=1.0)

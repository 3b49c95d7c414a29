"""ModelConfig: the values read from a checkpoint directory, and refusals in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rigs.models.published_configs import PUBLISHED
from rigs.models.tiny_models import tiny_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.rope_config import RopeConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000.0,
    "eos_token_id": 7,
}


QWEN3_5_TEXT: dict[str, Any] = {
    **{name: QWEN3[name] for name in QWEN3 if name not in {"architectures", "rope_theta"}},
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 98,
    "text_config": QWEN3_5_TEXT,
    "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 16, "num_heads": 2},
    "tie_word_embeddings": True,
}
"""A config as such checkpoints are published."""


def write(directory: Path, **changes: Any) -> str:
    config = {key: value for key, value in {**QWEN3, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_config_of_the_older_form_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    config = ModelConfig.from_path(path)
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.dtype, config.context_len) == (torch.bfloat16, 4096)
    assert config.eos_token_ids == (7, 9)
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig(theta=1000000.0)


def test_both_forms_of_rope_are_read_alike(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip
    old = ModelConfig.from_path(write(tmp_path, rope_scaling=scaling, rope_theta=5e5)).rope
    new = ModelConfig.from_path(
        write(tmp_path, rope_theta=..., rope_parameters={**scaling, "rope_theta": 5e5})
    ).rope
    assert old == new
    assert (old.theta, old.factor, old.original_max_position_embeddings) == (5e5, 8.0, 1024)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rotary_dim": 0}, r"rotary_dim=0 must be an integer from 1 to head_dim=128"),
        ({"rotary_dim": 129}, r"rotary_dim=129 must be"),
        ({"rotary_dim": 64.0}, r"rotary_dim=64.0 must be"),
        ({"rotary_dim": True}, r"rotary_dim=True must be"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_dim=64 contradicts partial"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor='x'"),
    ],
)
def test_dimensions_that_rotate(fields: dict[str, Any], words: str) -> None:
    """A class of transformers may have read them, and may not."""
    alone = {"head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6}
    for read in ({}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        found = RopeConfig.from_hf(SimpleNamespace(**alone, **read), may_be_partial=True)
        assert found.rotary_dim(128) == 64
    with pytest.raises(ValueError, match=words):
        RopeConfig.from_hf(SimpleNamespace(**{**alone, **fields}), may_be_partial=True)


def test_linear_rope_stretches_the_context(tmp_path: Path) -> None:
    config = ModelConfig.from_path(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert (config.rope.rope_type, config.rope.factor, config.context_len) == ("linear", 2.0, 8192)


def test_yarn_scales_rotations_and_the_scores_of_latent_attention(tmp_path: Path) -> None:
    scaling = {
        "type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 100, "beta_fast": 16,
    }  # fmt: skip
    rope = ModelConfig.from_path(write(tmp_path, rope_scaling=scaling)).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (40.0, 16.0, 1.0, True)
    log = 0.1 * 3.6888794541139363  # of the factor
    assert rope.attention_factor == pytest.approx((0.7 * log + 1) / (log + 1))
    assert rope.score_scale() == pytest.approx((log + 1) ** 2)
    plain = {name: value for name, value in scaling.items() if "mscale" not in name}
    rope = ModelConfig.from_path(write(tmp_path, rope_scaling=plain)).rope
    assert rope.attention_factor == pytest.approx(log + 1)
    assert rope.score_scale() == 1.0


def write_nested(directory: Path, text: dict[str, Any], **changes: Any) -> str:
    config = {**QWEN3_5, "text_config": {**QWEN3_5_TEXT, **text}, **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return str(directory)


def test_a_text_model_beside_a_vision_tower_is_read(tmp_path: Path) -> None:
    path = write_nested(tmp_path, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    config = ModelConfig.from_path(path)
    assert config.architecture == "Qwen3_5ForConditionalGeneration"
    assert (config.model_type, config.hf_config.model_type) == ("qwen3_5", "qwen3_5_text")
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (100, 4, 64)
    assert (config.dtype, config.context_len) == (torch.bfloat16, 262144)
    assert config.linear_attention_layers == (0, 1, 2)
    assert config.rope == RopeConfig(theta=1e7, partial_rotary_factor=0.25)
    assert config.eos_token_ids == (7, 9)
    assert config.tie_word_embeddings
    assert ModelConfig.from_path(path, context_length=5).context_len == 5
    # transformers writes the dtype and `tie_word_embeddings` beside the text model's config.
    text = {"torch_dtype": None, "tie_word_embeddings": True, "eos_token_id": [3]}
    path = write_nested(tmp_path, text, dtype="float16", tie_word_embeddings=False, eos_token_id=4)
    config = ModelConfig.from_path(path)
    assert (config.dtype, config.tie_word_embeddings) == (torch.float16, False)
    assert config.eos_token_ids == (3, 4, 7, 9)


def test_the_text_model_says_whether_its_head_is_tied(tmp_path: Path) -> None:
    """transformers' class of the whole ties it where config.json says nothing beside it."""
    path = str(PUBLISHED["Kimi-K2.5"].write(tmp_path))
    config = ModelConfig.from_path(path)
    assert (config.model_type, config.hf_config.model_type) == ("kimi_k25", "deepseek_v3")
    assert not config.tie_word_embeddings
    assert config.quantization is not None and config.quantization.block == (1, 32)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ({}, {"text_config": ...}, r"no text_config, which has the settings of Qwen3_5ForCond"),
        ({}, {"text_config": [1]}, r"no text_config"),
        (
            {},
            {"quantization_config": {"quant_method": "exl3"}},
            "'exl3' is not supported: supported are fp8",
        ),
        (
            {"quantization_config": {"quant_method": "exl3"}},
            {},
            "'exl3' is not supported: supported are fp8",
        ),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ({"max_position_embeddings": 0}, {}, "max_position_embeddings=0"),
        ({"linear_num_key_heads": "two"}, {}, "config.json is not valid"),
        ({}, {"model_type": "qwen3"}, "model_type='qwen3' is not that of Qwen3_5ForCond"),
        ({}, {"vision_config": {"depth": "one"}}, "config.json is not valid"),
        ({}, {"architectures": ["Qwen3VLForConditionalGeneration"]}, "not supported"),
    ],
)
def test_refusals_of_nested_settings_are_one_line(
    tmp_path: Path, text: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_path(write_nested(tmp_path, text, **changes))
    assert "\n" not in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def test_yarn_allows_a_longer_context(tmp_path: Path) -> None:
    """Model cards give YaRN's factor beside the `max_position_embeddings` of before."""
    path = write(tmp_path, rope_scaling=YARN)
    assert ModelConfig.from_path(path).context_len == 4096
    assert ModelConfig.from_path(path, context_length=8192).context_len == 8192
    with pytest.raises(ValueError, match=r"between 1 and 8192, .* \(YaRN's factor times orig"):
        ModelConfig.from_path(path, context_length=8193)
    # DeepSeek's states the extended length.
    path = write(tmp_path, rope_scaling={**YARN, "original_max_position_embeddings": 512})
    with pytest.raises(ValueError, match=r"between 1 and 4096, .* \(max_position_embeddings\)"):
        ModelConfig.from_path(path, context_length=4097)


REMOTE_CLASS = """
from pathlib import Path
from transformers.configuration_utils import PretrainedConfig

Path({marker!r}).touch()


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_act="silu", rms_norm_eps=1e-6, **more):
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        super().__init__(**more)
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that code of the checkpoint in `tmp_path` makes when it runs. Nobody may be asked."""
    cache = tmp_path / "modules"
    for module in ("dynamic_module_utils", "utils.hub", "utils"):
        name = f"transformers.{module}.HF_MODULES_CACHE"
        monkeypatch.setattr(name, str(cache), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def ask(_: object = "") -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    marker = tmp_path / "ran"
    (tmp_path / "own_config.py").write_text(REMOTE_CLASS.format(marker=str(marker)))
    return marker


def test_a_config_class_of_the_checkpoint_needs_the_flag(tmp_path: Path, ran: Path) -> None:
    path = write(tmp_path, model_type="own", auto_map={"AutoConfig": "own_config.OwnConfig"})
    with pytest.raises(ValueError, match=r"model_type='own'.*start with --trust-remote-code"):
        ModelConfig.from_path(path)
    assert not ran.exists()
    config = ModelConfig.from_path(path, trust_remote_code=True)
    assert ran.exists()
    assert (config.head_dim, config.rope.theta, config.context_len) == (32, 1e6, 4096)
    assert config.eos_token_ids == (7,)


def test_no_code_of_a_checkpoint_runs_where_transformers_has_a_class(
    tmp_path: Path, ran: Path
) -> None:
    path = write(tmp_path, auto_map={"AutoConfig": "own_config.OwnConfig"})
    for trusts in (False, True):
        assert ModelConfig.from_path(path, trust_remote_code=trusts).head_dim == 32
    assert not ran.exists()


def test_the_fields_of_a_remote_class_are_checked_too(tmp_path: Path, ran: Path) -> None:
    path = write(
        tmp_path, model_type="own", auto_map={"AutoConfig": "own_config.OwnConfig"}, own_scale=2.0
    )
    with pytest.raises(ValueError, match=r"own_scale=2\.0"):
        ModelConfig.from_path(path, trust_remote_code=True)
    assert not ran.exists()


def test_overrides_replace_fields(tmp_path: Path) -> None:
    config = ModelConfig.from_path(write(tmp_path), dtype="float32", context_length=100)
    assert (config.dtype, config.context_len) == (torch.float32, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*not supported.*LlamaForCaus"),
        ({"architectures": ...}, r"missing \(model_type 'qwen3'\)"),
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
            "all layers have a window of 128 tokens.*--context-length 128",
        ),
        (
            {"use_sliding_window": True, "sliding_window": -1, "max_window_layers": 1},
            "sliding_window=-1",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'.*llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear'.*factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'.*factor|factor.*'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor=-1.0"),
        (
            {"quantization_config": {"quant_method": "exl3"}},
            "'exl3' is not supported: supported are fp8",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "llama"}, "model_type='llama' is not that of Qwen3ForCausalLM"),
        ({"model_type": ...}, "model_type=None is not that of Qwen3ForCausalLM"),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, "factor=inf"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1 .*'yarn' needs a number above 1"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings=0.5 in config.json must be at least 1",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_hidden_layers": "two"}, "config.json"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"eos_token_id": ["end"]}, "eos_token_id|config.json is not valid"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_path(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' must be one of auto"),
        ({"context_length": 4097}, "between 1 and 4096"),
        ({"context_length": 0}, "between 1 and 4096"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_path(write(tmp_path), **kwargs)


def test_a_window_of_mistral_bounds_the_context(tmp_path: Path) -> None:
    """Its config has no `layer_types`: every layer has the window."""
    path = tmp_path / "mistral"
    tiny_config("mistral", architectures=["MistralForCausalLM"]).save_pretrained(path)
    assert ModelConfig.from_path(str(path)).context_len == 512
    config = tiny_config("mistral", architectures=["MistralForCausalLM"], sliding_window=128)
    config.save_pretrained(path)
    with pytest.raises(ValueError, match=r"all layers have a window of 128 .*--context-length 128"):
        ModelConfig.from_path(str(path))
    assert ModelConfig.from_path(str(path), context_length=128).sliding_window is None


def test_missing_and_torn_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a directory: give the local directory"):
        ModelConfig.from_path(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no config\.json"):
        ModelConfig.from_path(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen')
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.from_path(str(tmp_path))

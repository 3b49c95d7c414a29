"""generation_config.json: sampling values, end tokens, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.generation_config import sampling_defaults
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


def defaults(directory: Path, content: dict[str, Any], setting: str = "model") -> Any:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return sampling_defaults(str(directory), setting, 100)


def test_the_file_gives_the_values_that_it_has(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_k": 20, "min_p": None, "do_sample": False, "max_length": 9}
    found = defaults(tmp_path, content)
    assert found.values == {"temperature": 0.6, "top_k": 20}
    assert found.line() == (
        "sampling defaults: temperature 0.6, top_p 1, top_k 20, min_p 0, repetition_penalty 1 "
        "(generation_config.json has temperature, top_k)"
    )
    everything = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    assert defaults(tmp_path, everything).all_values == everything


def test_a_top_k_of_0_is_the_whole_vocabulary(tmp_path: Path) -> None:
    assert defaults(tmp_path, {"top_k": 0}).values == {"top_k": -1}


def test_without_values_or_a_file_defaults_are_plain(tmp_path: Path) -> None:
    plain = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert sampling_defaults(str(tmp_path), "model", 100).all_values == plain
    none = defaults(tmp_path, {"eos_token_id": 2})
    assert (none.values, none.source) == ({}, "generation_config.json has none")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", [0.6]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", {}),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 7),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: {field}\b") as caught:
        defaults(tmp_path, {field: value})
    assert "--sampling-defaults openai" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert defaults(tmp_path, {field: value}, "openai").values == {}


def config_of(directory: Path, tokenizer_end: object, config: object, file: object) -> ModelConfig:
    """The config of a model whose tokenizer and files name these end tokens."""
    save_tiny_checkpoint(str(directory), "qwen3", eos_token_id=config)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": file}))
    tokenizer = SimpleNamespace(eos_token_id=tokenizer_end)
    return ModelConfig.from_path(str(directory)).with_end_of(cast(Any, tokenizer))


def test_the_end_tokens_of_both_files_and_of_the_tokenizer_count(tmp_path: Path) -> None:
    assert config_of(tmp_path, 5, 3, [9, 3]).eos_token_ids == (3, 5, 9)
    assert config_of(tmp_path, 5, None, None).eos_token_ids == (5,)
    assert config_of(tmp_path, None, [4, 3], 9).eos_token_ids == (3, 4, 9)


def test_end_tokens_that_the_model_cannot_choose_are_left_out(tmp_path: Path) -> None:
    """A request with `min_new_tokens` masks all end tokens by their index."""
    assert config_of(tmp_path, 10**6, [3, 10**6, -1], 10**7).eos_token_ids == (3,)


@pytest.mark.parametrize("value", ["2", [1, None], [True], {"a": 1}, 2.0])
def test_an_end_token_that_is_none_is_refused_by_name(tmp_path: Path, value: object) -> None:
    save_tiny_checkpoint(str(tmp_path), "qwen3", eos_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id="):
        ModelConfig.from_path(str(tmp_path))

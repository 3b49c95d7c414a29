"""Reads a checkpoint's config file. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sglang.srt.utils.lfs_pointer import refuse_lfs_pointer

SUPPORTED_ARCHITECTURES: Final = (
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Values of `architectures` in config.json. `models.registry` has a class for each."""

TEXT_CONFIG: Final = "text_config"
"""The object of config.json that has the settings of a text model which is a part of the whole."""
WITH_TEXT_CONFIG: Final = frozenset(
    {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)
"""Those of `SUPPORTED_ARCHITECTURES` whose text model is a part; it alone is served."""


def supported_architecture(model_path: str) -> str:
    """The one of `SUPPORTED_ARCHITECTURES` that the checkpoint in directory `model_path` has.

    Raises:
        ValueError: There is no checkpoint, or its architecture is not supported. One line with
            the remedy.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        raise ValueError(
            f"model path {model_path!r} is not a directory: give the local directory of a "
            "Hugging Face checkpoint (nothing is downloaded)"
        )
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ValueError(f"{model_path} has no config.json: it is not a checkpoint directory")
    text = raw.get(TEXT_CONFIG)
    for part in (raw, text):
        if isinstance(part, dict) and part.get("quantization_config") is not None:
            raise ValueError(
                f"{directory}: config.json has a quantization_config: quantized weights are not "
                "supported, use the unquantized checkpoint"
            )
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if name in WITH_TEXT_CONFIG and not isinstance(text, dict):
            raise ValueError(
                f"{directory}: config.json has no {TEXT_CONFIG}, which the settings of {name}'s "
                "text model are in: copy the checkpoint again"
            )
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = names or f"missing (model_type {raw.get('model_type')!r})"
    raise ValueError(
        f"{directory}: architectures {found} in config.json is not supported: "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file `path`; None if there is no such file.

    Raises:
        ValueError: The file cannot be read or is not a JSON object.
    """
    refuse_lfs_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object: copy it again")
    return value

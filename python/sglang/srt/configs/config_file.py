"""Finds and checks config.json of a checkpoint directory. Needs neither torch nor transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_fields import FIELDS, TEXT_CONFIG, check_fields, shown
from sglang.srt.configs.quantization_config import quantization_of
from sglang.srt.utils.json_files import read_json


def read_config(
    model_path: str, *, trust_remote_code: bool = False, quantization: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Read and check config.json of the checkpoint in directory `model_path`. Returns its key in
    `FIELDS`, and the whole config.

    Args:
        trust_remote_code: True if a config class of the checkpoint may run.
        quantization: Name of the weight format; None: the checkpoint's own.

    Raises:
        ValueError: There is no checkpoint, or its architecture, its weight format or a field is not
            supported. One line with the remedy.
    """
    directory = Path(model_path)
    # `Path.is_dir` raises OSError for a name that is too long.
    if not os.path.isdir(directory):
        raise ValueError(
            f"model path {model_path!r} is not a directory: give the local directory of a "
            "Hugging Face checkpoint, or its name on the hub (OWNER/NAME)"
        )
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ValueError(f"{model_path} has no config.json: it is not a checkpoint directory")
    text = raw.get(TEXT_CONFIG)
    try:
        quantization_of(raw, asked=quantization)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    name = _architecture(raw, directory)
    if FIELDS[name].text is not None and not isinstance(text, dict):
        raise ValueError(
            f"{directory}: config.json has no {TEXT_CONFIG}, which has the settings of {name}'s "
            "text model: copy the checkpoint again"
        )
    if is_remote_config(raw, name) and not trust_remote_code:
        raise ValueError(
            f"{directory}: config.json has model_type={raw.get('model_type')!r}, whose code comes "
            "with the checkpoint (auto_map): if you trust that code, start with "
            "--trust-remote-code"
        )
    try:
        check_fields(raw, name)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    return name, raw


def is_remote_config(raw: dict[str, Any], architecture: str) -> bool:
    """True if config.json is read by a class that comes with the checkpoint: transformers has none
    for its `model_type`, as with Kimi-K2's.

    Raises:
        ValueError: Its `model_type` is of another architecture, and no class comes with it.
    """
    fields, model_type = FIELDS[architecture], raw.get("model_type")
    if isinstance(model_type, str) and model_type in fields.model_types:
        return False
    auto_map = raw.get("auto_map")
    if fields.text is None and isinstance(auto_map, dict) and "AutoConfig" in auto_map:
        return True
    raise ValueError(
        f"config.json: model_type={model_type!r} is not that of {architecture} "
        f"({', '.join(sorted(fields.model_types))}): copy the checkpoint again"
    )


def _architecture(raw: dict[str, Any], directory: Path) -> str:
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name in FIELDS:
            return name
    found = shown(names) if names else f"missing (model_type {raw.get('model_type')!r})"
    raise ValueError(
        f"{directory}: architectures {found} in config.json is not supported: "
        f"supported are {', '.join(sorted(FIELDS))}"
    )

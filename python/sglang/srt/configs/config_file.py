"""Reads and checks a checkpoint's config file. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_fields import FIELDS, TEXT_CONFIG, check_fields
from sglang.srt.utils.lfs_pointer import refuse_lfs_pointer


def supported_architecture(model_path: str, *, trust_remote_code: bool = False) -> str:
    """The key of `FIELDS` that the checkpoint in directory `model_path` has; its config.json is
    checked.

    Args:
        trust_remote_code: Whether a config class that comes with the checkpoint may be run.

    Raises:
        ValueError: There is no checkpoint, or its architecture or a field is not supported. One
            line with the remedy.
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
    return name


def is_remote_config(raw: dict[str, Any], architecture: str) -> bool:
    """Whether config.json is read by a class that comes with the checkpoint: transformers has none
    for its `model_type`, as with Kimi-K2's.

    Raises:
        ValueError: Its `model_type` is of another architecture, and no class comes with it.
    """
    fields, model_type = FIELDS[architecture], raw.get("model_type")
    if model_type in fields.model_types:
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
        if name in FIELDS:
            return str(name)
    found = names or f"missing (model_type {raw.get('model_type')!r})"
    raise ValueError(
        f"{directory}: architectures {found} in config.json is not supported: "
        f"supported are {', '.join(sorted(FIELDS))}"
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

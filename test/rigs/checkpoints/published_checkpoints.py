"""Writes tiny checkpoints like published ones, with their fields, names and weight format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from rigs.models.published_configs import PUBLISHED
from rigs.models.quantized_checkpoints import Format, write_quantized
from rigs.models.tiny_models import save_tiny_checkpoint

_OF_THE_PUBLISHED: Final = (
    "architectures",
    "model_type",
    "auto_map",
    "quantization_config",
    "vision_config",
)
"""Fields that keep their published values; others have a tiny model's."""


def save_as_published(
    directory: Path, name: str, family: str, form: Format | None = None, **overrides: Any
) -> tuple[Path, PreTrainedModel]:
    """Write a random tiny model as the checkpoint `name` of `PUBLISHED` is written.

    Args:
        directory: An empty directory.
        family: The tiny model's, whose names in a file are the published ones.
        form: The weight format; None: the weights are not quantized.
        overrides: See `save_tiny_checkpoint`.

    Returns:
        Path of the checkpoint, and transformers' model with the values of its weights.
    """
    plain = path = directory / "written"
    model = save_tiny_checkpoint(path, family, eos_token_id=None, **overrides)
    if form is not None:
        path, plain = write_quantized(path, directory, form), directory / "plain"
        model = type(model).from_pretrained(plain)
    file = path / "config.json"
    tiny = json.loads(file.read_text())
    file.write_text(json.dumps(_made_small(PUBLISHED[name].config, tiny)))
    return path, model


def _made_small(published: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """The published fields, with the values of a tiny model."""
    made: dict[str, Any] = {}
    for field, value in published.items():
        if field in _OF_THE_PUBLISHED:
            made[field] = value
        elif field == "dtype":
            made[field] = "float32"
        elif field == "text_config":
            made[field] = _made_small(value, tiny[field])
        else:
            made[field] = tiny.get(field, value)
    return made

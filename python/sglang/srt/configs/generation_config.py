"""Sampling values that a checkpoint recommends, in its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from sglang.srt.constants import OPENAI_SAMPLING
from sglang.srt.sampling.sampling_params import SamplingParams, read_params
from sglang.srt.utils.json_files import read_json

GENERATION_CONFIG: Final = "generation_config.json"
_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling values of requests that name none."""

    values: dict[str, Any]
    """Fields of `SamplingParams` that the checkpoint recommends; others have the engine's
    defaults."""
    source: str
    """Origin of the values, in words."""

    @property
    def all_values(self) -> dict[str, float]:
        """All fields that a checkpoint may recommend."""
        params = SamplingParams(**self.values)
        return {name: getattr(params, name) for name in _FIELDS}

    def line(self) -> str:
        """The line of the log."""
        shown = ", ".join(f"{name} {value:g}" for name, value in self.all_values.items())
        return f"sampling defaults: {shown} ({self.source})"


def sampling_defaults(model_path: str, setting: str, vocab_size: int) -> SamplingDefaults:
    """The defaults of the checkpoint in the directory `model_path`.

    Args:
        setting: `--sampling-defaults`; `OPENAI_SAMPLING` ignores the file.

    Raises:
        ValueError: The file or a value in it is wrong. One line with the field and the remedy.
    """
    if setting == OPENAI_SAMPLING:
        return SamplingDefaults(values={}, source=f"--sampling-defaults {OPENAI_SAMPLING}")
    path = Path(model_path) / GENERATION_CONFIG
    given = read_json(path) or {}
    values: dict[str, Any] = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    if values.get("top_k") == 0:
        values["top_k"] = -1  # In this file 0 is the whole vocabulary.
    try:
        params: SamplingParams = read_params(values)
        params.verify(vocab_size)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(
            f"{path}: {_with_field(error)}: correct it, or ignore the file's sampling values with "
            f"--sampling-defaults {OPENAI_SAMPLING}"
        ) from None
    if not values:
        return SamplingDefaults(values={}, source=f"{GENERATION_CONFIG} has none")
    values = {name: getattr(params, name) for name in values}
    source = f"{GENERATION_CONFIG} has {', '.join(values)}"
    return SamplingDefaults(values=values, source=source)


def _with_field(error: Exception) -> str:
    """The cause, which begins with the field."""
    cause, _, place = str(error).partition(" - at `$.")
    return f"{place.rstrip('`')}: {cause[:1].lower()}{cause[1:]}" if place else cause

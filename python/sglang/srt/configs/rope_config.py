"""Rotary embedding settings, read from a Hugging Face config of older or newer form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The settings that determine the rotation angles of a model's heads."""

    rope_type: str = "default"
    """One of `SUPPORTED_ROPE_TYPES`, or "none" for models that rotate nothing."""
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    """Part of a head's dimensions that rotate: the first ones, of DeepSeek-V4 the last ones."""
    factor: float = 1.0
    """All but `default`: the factor by which the context was extended."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """`llama3`, `yarn`: context length in tokens before the extension."""
    beta_fast: float = 32.0
    """`yarn`: dimensions that turn more often than this in the original context are kept."""
    beta_slow: float = 1.0
    """`yarn`: dimensions that turn less often than this are slowed by `factor`."""
    truncate: bool = True
    """`yarn`: the two bounds are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """`yarn`: factor of cosines and sines."""
    mscale_all_dim: float = 0.0
    """Coefficient of the score scale of models with latent attention; see `score_scale`."""

    def score_scale(self) -> float:
        """The factor of attention scores in models that scale all of a head's dimensions."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that rotate."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(
        cls, hf_config: Any, *, may_be_partial: bool = False, part: str | None = None
    ) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (older).

        Args:
            may_be_partial: True if the architecture can rotate a part of a head's dimensions.
            part: Name of the settings in `rope_parameters`, where there are several; None: one.

        Raises:
            ValueError: The scaling type or a partial rotation is not supported, or a field is
                missing; the message names it.
        """
        raw = getattr(hf_config, "rope_parameters", None) or getattr(
            hf_config, "rope_scaling", None
        )
        params: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        if part is not None:
            params = params[part]
        theta = params.get("rope_theta") or getattr(hf_config, "rope_theta", None) or DEFAULT_THETA
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} in config.json is not supported: "
                f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        partial = _fraction(_rotated_part(params, hf_config))
        if partial != 1.0 and not may_be_partial:
            raise ValueError(
                f"partial_rotary_factor={partial} in config.json is not supported: "
                "only 1.0 (all of a head's dimensions rotate) is"
            )
        if (
            isinstance(theta, bool)
            or not isinstance(theta, int | float)
            or not 0 < theta < math.inf
        ):
            raise ValueError(f"rope_theta={theta!r} in config.json must be a positive number")
        plain = cls(theta=float(theta), partial_rotary_factor=partial)
        if rope_type == "default":
            return plain
        factor = _number(params, "factor", rope_type)
        mscale_all_dim = _number(params, "mscale_all_dim", rope_type, default=0.0)
        scaled = replace(plain, rope_type=rope_type, factor=factor, mscale_all_dim=mscale_all_dim)
        if rope_type == "linear":
            return scaled
        if rope_type == "yarn":
            if theta <= 1:
                raise ValueError(
                    f"rope_theta={theta!r} in config.json: rope type 'yarn' needs a number above 1"
                )
            return replace(
                scaled,
                original_max_position_embeddings=_original_length(params, rope_type),
                beta_fast=_number(params, "beta_fast", rope_type, default=32.0),
                beta_slow=_number(params, "beta_slow", rope_type, default=1.0),
                truncate=bool(params.get("truncate", True)),
                attention_factor=_attention_factor(params, factor),
            )
        return replace(
            scaled,
            low_freq_factor=_number(params, "low_freq_factor", rope_type),
            high_freq_factor=_number(params, "high_freq_factor", rope_type),
            original_max_position_embeddings=_original_length(params, rope_type),
        )


def _rotated_part(params: Mapping[str, Any], hf_config: Any) -> object:
    """`partial_rotary_factor`, or that of `rotary_dim`, which transformers 5.17 ignores.

    Raises:
        ValueError: `rotary_dim` is no number of a head's dimensions, or contradicts the factor.
    """
    part, dims = params.get("partial_rotary_factor"), getattr(hf_config, "rotary_dim", None)
    if dims is None:
        return 1.0 if part is None else part
    head_dim = hf_config.head_dim
    if isinstance(dims, bool) or not isinstance(dims, int) or not 0 < dims <= head_dim:
        raise ValueError(
            f"config.json: rotary_dim={dims!r} must be an integer from 1 to head_dim={head_dim}"
        )
    if part is not None and dims != int(head_dim * _fraction(part)):
        raise ValueError(
            f"config.json: rotary_dim={dims} contradicts partial_rotary_factor={part} of "
            f"head_dim={head_dim}: copy the checkpoint again"
        )
    return dims / head_dim


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={value!r} in config.json must be above 0 and "
            "at most 1"
        )
    return float(value)


def _attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, which is applied to the rotation instead of the scores."""
    if params.get("attention_factor") is not None:
        return _number(params, "attention_factor", "yarn")
    mscale = _number(params, "mscale", "yarn", default=0.0)
    all_dim = _number(params, "mscale_all_dim", "yarn", default=0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's rule for how much scores grow with a context that is extended by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _original_length(params: Mapping[str, Any], rope_type: str) -> int:
    """The context length before the extension, in tokens."""
    name = "original_max_position_embeddings"
    length = int(_number(params, name, rope_type))
    if length < 1:
        raise ValueError(
            f"rope_parameters.{name}={params[name]!r} in config.json must be at least 1"
        )
    return length


def _number(
    params: Mapping[str, Any], name: str, rope_type: str, *, default: float | None = None
) -> float:
    """A field that must be positive; with a default it may be missing, or as the default."""
    value = params.get(name)
    if default is not None and value in (None, default):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"rope_parameters.{name}={value!r} in config.json: rope type {rope_type!r} "
            "needs a positive number there"
        )
    return float(value)

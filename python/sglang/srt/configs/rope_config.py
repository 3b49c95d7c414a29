"""Rotary embedding settings, read from a Hugging Face config of older or newer form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The settings that determine the rotation angles of a model's heads."""

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    """Part of a head's dimensions that rotate: the first ones."""
    factor: float = 1.0
    """`linear`, `llama3`: the factor by which the context was extended."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """`llama3`: context length in tokens before the extension."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that rotate."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(cls, hf_config: Any, *, may_be_partial: bool = False) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (older).

        Args:
            may_be_partial: Whether the architecture can rotate a part of a head's dimensions.

        Raises:
            ValueError: The scaling type or a partial rotation is not supported, or a field is
                missing; the message names it.
        """
        raw = getattr(hf_config, "rope_parameters", None) or getattr(
            hf_config, "rope_scaling", None
        )
        params: Mapping[str, Any] = raw or {}
        theta = params.get("rope_theta") or getattr(hf_config, "rope_theta", None) or DEFAULT_THETA
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} in config.json is not supported: "
                f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        partial = params.get("partial_rotary_factor", 1.0)
        if may_be_partial and rope_type == "default":
            return cls(theta=float(theta), partial_rotary_factor=_fraction(partial))
        if partial != 1.0:
            raise ValueError(
                f"partial_rotary_factor={partial} in config.json is not supported: "
                "only 1.0 (all of a head's dimensions rotate) is"
            )
        if rope_type == "default":
            return cls(theta=float(theta))
        if rope_type == "linear":
            return cls(
                rope_type=rope_type, theta=float(theta), factor=_number(params, "factor", rope_type)
            )
        return cls(
            rope_type=rope_type,
            theta=float(theta),
            factor=_number(params, "factor", rope_type),
            low_freq_factor=_number(params, "low_freq_factor", rope_type),
            high_freq_factor=_number(params, "high_freq_factor", rope_type),
            original_max_position_embeddings=int(
                _number(params, "original_max_position_embeddings", rope_type)
            ),
        )


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={value!r} in config.json must be above 0 and "
            "at most 1"
        )
    return float(value)


def _number(params: Mapping[str, Any], name: str, rope_type: str) -> float:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(
            f"rope_parameters.{name}={value!r} in config.json: rope type {rope_type!r} "
            "needs a positive number there"
        )
    return float(value)

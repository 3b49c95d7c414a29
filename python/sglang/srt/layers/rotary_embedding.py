"""Rotary position embedding: default, linear, llama3 and yarn frequencies, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.triton_ops.arguments import AngleKinds


class Rotation(NamedTuple):
    """One batch's angles, computed once and used by every layer."""

    cos: torch.Tensor
    """`[num_tokens, 1, rotary_dim]` in the model's dtype."""
    signed_sin: torch.Tensor
    """Likewise; the first half is negated in advance, for `apply_rotary`."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per token of each pair of dimensions.

    llama3's rule slows waves longer than the original context by `factor`, keeps waves shorter than
    the original context divided by `high_freq_factor`, and interpolates between.

    Returns:
        fp32 `[head_dim / 2]` on the CPU.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "none":
        # Angles of 0 keep every number as it is.
        return torch.zeros_like(freqs)
    if rope.rope_type == "linear":
        return freqs / rope.factor
    if rope.rope_type == "llama3":
        turns = rope.original_max_position_embeddings * freqs / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return freqs * (keep + (1.0 - keep) / rope.factor)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, freqs)
    assert rope.rope_type == "default", rope.rope_type
    return freqs


def _yarn_frequencies(rope: RopeConfig, freqs: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al., 2023), "NTK by parts".

    Pairs with more than `beta_fast` turns in the original context are kept, pairs with fewer than
    `beta_slow` turns are slowed by `factor`, and pairs between are interpolated.
    """
    pairs = len(freqs)

    def pair_that_turns(turns: float) -> float:
        # Not the log of the quotient, which overflows.
        length = math.log(rope.original_max_position_embeddings) - math.log(2 * math.pi)
        return pairs * (length - math.log(turns)) / math.log(rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound counts dimensions, not pairs, in the method's own code.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = torch.arange(pairs, dtype=torch.float32) - first
    slowed = (ramp / max(last - first, 0.001)).clamp(0.0, 1.0)
    return freqs / rope.factor * slowed + freqs * (1.0 - slowed)


class RotaryEmbedding(torch.nn.Module):
    """Rotary angles, computed for each batch in fp32, without a table that bounds the context."""

    inv_freq: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, *, placement: TensorPlacement) -> None:
        super().__init__()
        self.dtype = placement.dtype
        self.scale = rope.attention_factor
        self.kernels = fused_kernels(placement.device)
        self.register_buffer(
            "inv_freq", inverse_frequencies(rope, head_dim).to(placement.device), persistent=False
        )
        self._table = angle_kinds([(self, 1)])

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Angles of int64 `[num_tokens]` positions."""
        if self.kernels is not None:
            cos, sin = self.kernels.rotary_angles(positions, self._table, self.dtype)
            return Rotation(cos[0], sin[0])
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(self.dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(self.dtype).unsqueeze(1),
        )


def angle_kinds(kinds: Sequence[tuple[RotaryEmbedding, int]]) -> AngleKinds:
    """The argument of `rotary_angles` for the kinds of `RotaryKinds`."""
    device = kinds[0][0].inv_freq.device
    return AngleKinds(
        torch.stack([rotary.inv_freq for rotary, _ in kinds]),
        torch.tensor([rotary.scale for rotary, _ in kinds], device=device),
        torch.tensor([multiple for _, multiple in kinds], device=device),
    )


class RotaryKinds:
    """Several kinds of angles of the same positions, in one launch."""

    def __init__(self, kinds: Sequence[tuple[RotaryEmbedding, int]]) -> None:
        """Args:
        kinds: Embeddings of one rotary dimension; positions are rounded down to multiples of the
            number beside each.
        """
        self._kinds, self._table = kinds, angle_kinds(kinds)
        first, _ = kinds[0]
        self._kernels, self._dtype = first.kernels, first.dtype

    def forward(self, positions: torch.Tensor) -> list[Rotation]:
        """The angles of each kind, for int64 `[num_tokens]` positions."""
        if self._kernels is None:
            return [
                rotary.forward(positions // multiple * multiple if multiple > 1 else positions)
                for rotary, multiple in self._kinds
            ]
        found = self._kernels.rotary_angles(positions, self._table, self._dtype)
        return [Rotation(*angles) for angles in zip(*found, strict=True)]


def apply_rotary(
    x: torch.Tensor,
    rotation: Rotation,
    out: torch.Tensor | None = None,
    *,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Rotate the first `rotary_dim` dimensions, or all, and copy the others.

    Args:
        x: `[num_tokens, num_heads, head_dim]`, the last dimension dense.
        out: Overwritten: like `x`, or `x` itself. None: a new tensor.
        is_interleaved: If true, dimensions 2i and 2i + 1 of `x` are a pair, and become dimensions i
            and i + rotary_dim / 2, for checkpoints that pair neighbours. Scores stay the same if
            queries and keys are reordered alike. Else dimensions i and i + rotary_dim / 2 are a
            pair.

    Returns:
        `out`.
    """
    kernels = fused_kernels(x.device)
    if kernels is not None:
        angles = rotation.cos, rotation.signed_sin
        return kernels.rotate(x, angles, out, is_interleaved=is_interleaved)
    rotary_dim = rotation.cos.shape[-1]
    rotated = x[..., :rotary_dim]
    if is_interleaved:
        rotated = _deinterleave(rotated)
    swapped = rotated.roll(rotary_dim // 2, dims=-1)
    rotated = torch.addcmul(rotated * rotation.cos, swapped, rotation.signed_sin)
    if out is x:
        x[..., :rotary_dim] = rotated
        return x
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1, out=out)


def _deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Reorder the last dimension: pairs 2i and 2i + 1 become pairs i and i + half."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)

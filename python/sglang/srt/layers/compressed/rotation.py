"""Rotation of the last elements of vectors, in pairs of neighbours."""

from __future__ import annotations

import torch

from sglang.srt.layers.rotary_embedding import Rotation


def rotate_last(x: torch.Tensor, rotation: Rotation, *, is_inverse: bool = False) -> torch.Tensor:
    """Rotate the last elements in fp32, and copy the others.

    Args:
        x: `[n, dim]` or `[n, heads, dim]`.
        rotation: Angles of `n` positions.
        is_inverse: True to undo a rotation by these angles.
    """
    cos, sin = (angles.squeeze(1).float() for angles in rotation)
    size = cos.shape[-1]
    # The second half of the sines has their own sign.
    cos, sin = cos[:, : size // 2], sin[:, size // 2 :]
    if is_inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = torch.unflatten(x[..., -size:].float(), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :-size], turned.flatten(-2).to(x.dtype)), dim=-1)

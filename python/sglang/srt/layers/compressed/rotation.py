"""Rotation of the last elements of vectors, in pairs of neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import WideRMSNorm
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


def rotate_heads(x: torch.Tensor, rotation: Rotation, eps: float | None = None) -> torch.Tensor:
    """Rotate the last elements of heads `[num_tokens, num_heads, dim]`, which are first normalised
    without a weight if there is an `eps`."""
    kernels = fused_kernels(x.device)
    if kernels is not None:
        return kernels.rotate_heads(x, rotation, eps)
    if eps is not None:
        x = F.rms_norm(x, x.shape[-1:], None, eps)
    return rotate_last(x, rotation)


def normalise_latents(
    x: torch.Tensor, norms: tuple[WideRMSNorm, WideRMSNorm], rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the latent vectors of queries, and keys, whose last elements are rotated.

    Args:
        x: `[num_tokens, rank + dim]`: latent vectors and keys side by side.
        norms: The norms of both.

    Returns:
        `[num_tokens, rank]` and `[num_tokens, dim]`.
    """
    first, second = norms
    kernels = fused_kernels(x.device)
    if kernels is not None:
        weights = first.weight, second.weight
        return kernels.normalise_latents(x, weights, rotation, first.eps)
    sizes = [len(first.weight), len(second.weight)]
    latent, key = (part.contiguous() for part in torch.split(x, sizes, dim=1))
    return first.forward(latent), rotate_last(second.forward(key), rotation)

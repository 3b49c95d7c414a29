"""Rows of state in fp8: how latent rows and indexer keys are rounded, stored and read.

A row has rounded elements, and maybe further values that are not rounded. Its bytes are

    elements    fp8 e4m3, each divided by the scale of its group
    scales      fp32, one for each group of 128 elements: the largest magnitude / 448, or 1 if all
                elements are 0
    the rest    bf16

A latent row of DeepSeek takes 512 + 4 * 4 + 2 * 64 = 656 bytes, an indexer key 128 + 4 = 132. A row
of fewer than 128 elements is one group.

Source: DeepSeek-V3 technical report, section 3.3 (groups of 128 elements, each with its scale);
FlashMLA's fp8 KV cache has latent rows with the same bytes.

Rows in fp8 are uint8; rows of another dtype are the values.
"""

from __future__ import annotations

from typing import Final

import torch

GROUP: Final = 128
"""Elements that share a scale."""
FP8_MAX: Final = 448.0
"""Largest value of e4m3."""
LEAST_SCALE: Final = 2.0**-126
"""Below this, the smallest normal fp32, a scale is 1 and its elements become 0."""
FP8: Final = torch.float8_e4m3fn


def num_groups(elements: int) -> int:
    """Groups, and scales, of a row with this many elements."""
    return -(-elements // GROUP)


def row_bytes(elements: int, rest: int = 0, *, sizes: str) -> int:
    """Bytes of a row with `elements` in fp8 and `rest` values in bf16.

    Args:
        sizes: The two numbers by their names in config.json, for the error.

    Raises:
        ValueError: The last group would be short, or scales or values would not be aligned.
    """
    if rest % 2 or elements % (GROUP if elements > GROUP else 4):
        raise ValueError(
            f"config.json: {sizes}: rows in fp8 have a multiple of {GROUP} elements (of 4, if "
            f"fewer than {GROUP}), then an even number of values; use --kv-cache-dtype auto or "
            "bfloat16"
        )
    return elements + 4 * num_groups(elements) + 2 * rest


def pack(values: torch.Tensor, elements: int) -> torch.Tensor:
    """Rows in fp8, uint8 `[n, bytes of a row]`.

    Args:
        values: `[n, elements + rest]`, any float dtype.
    """
    count = num_groups(elements)
    groups = values[:, :elements].float().view(len(values), count, elements // count)
    scales = groups.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    scales = torch.where(scales < LEAST_SCALE, 1.0, scales)
    parts = (
        (groups / scales).to(FP8).view(len(values), elements),
        scales.squeeze(-1),
        values[:, elements:].to(torch.bfloat16).contiguous(),
    )
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def read_rows(stored: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of stored rows.

    Args:
        stored: uint8 `[..., bytes of a row]`; or `[..., elements + rest]` of another dtype.
        elements: Elements of a row that may be in fp8.

    Returns:
        `[..., elements + rest]` of `dtype`.
    """
    if stored.dtype is not torch.uint8:
        return stored.to(dtype)
    scales_end = elements + 4 * num_groups(elements)
    found = stored[..., :elements].view(FP8).to(torch.float32)
    scales = stored[..., elements:scales_end].contiguous().view(torch.float32)
    rest = stored[..., scales_end:].contiguous().view(torch.bfloat16)
    groups = found.view(*scales.shape, elements // scales.shape[-1])
    found = (groups * scales.unsqueeze(-1)).view(*found.shape)
    return torch.cat((found.to(dtype), rest.to(dtype)), dim=-1)

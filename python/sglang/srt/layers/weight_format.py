"""Formats of quantized weights, which layers ask for before the weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from sglang.srt.layers.triton_ops.arguments import LEAST_PACKED

BLOCK: Final = 128
"""Outputs of a block, and inputs, that have one scale in memory."""
EXPONENTS: Final = torch.uint8
"""Dtype of scales that are powers of two, in memory: e8m0."""
SCALE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, EXPONENTS)
"""Dtypes of scales in memory: the first for fp8, the last for 4-bit floats, the others for 4-bit
integers."""
_PACKED_GROUPS: Final = frozenset((32, 64, 128))
"""Inputs of a group of 4-bit elements, unless it has all inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the elements of one weight of a checkpoint are quantized."""

    bits: int = 8
    """8: fp8; 4: integers, or floats (e2m1) if scales are `EXPONENTS`."""
    block: tuple[int, int] = (1, -1)
    """Outputs and inputs that share a scale; negative: all."""
    scales: torch.dtype = torch.float32
    """Dtype of the scales in memory."""
    has_zeros: bool = False
    """True if integers have zero points, otherwise 8."""
    why_dequantized: str | None = None
    """Reason why no kernel multiplies weights of this format; None: kernels do."""

    def group(self, share: int, total: int) -> int | None:
        """Inputs that share a scale in the memory of a rank; None: no kernel takes such groups.

        The result is the same on all ranks: their shares are equal, or whole groups.

        Args:
            share: Inputs of the rank.
            total: Inputs of the weight.
        """
        width = total if self.block[1] < 0 else min(self.block[1], total)
        if width % share == 0:
            width = share  # one group, or a part of one
        elif share % width or width not in (_PACKED_GROUPS if self.bits == 4 else (BLOCK,)):
            return None
        return width if self.bits == 8 or width % LEAST_PACKED == 0 else None


FormatOf: TypeAlias = Callable[[str], WeightFormat | None]
"""Format of the weight with this name in the checkpoint; None: it is not quantized."""


@dataclass(slots=True, kw_only=True)
class WeightFormats:
    """Formats of quantized weights, and the number of those that layers do not keep."""

    of: FormatOf
    dequantized: Counter[str] = field(default_factory=Counter)
    """Number of weights that are dequantized at load, by reason."""

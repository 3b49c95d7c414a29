"""Plain weights, rounded to a weight format at load.

fp8 is what `--quantization fp8` makes of a plain checkpoint. Random weights are rounded to 4 bits
where config.json states them. A scale is the greatest magnitude of its block, divided by the
greatest number of the format. Every rank rounds whole weights, so values do not depend on the
number of ranks.
"""

from __future__ import annotations

import re
from typing import Final

import torch
import torch.nn.functional as F

from sglang.srt.configs.quantization_config import OF_EXPERT, Packing, QuantizationConfig
from sglang.srt.layers.quantization.quantized_tensor import (
    E2M1,
    E8M0,
    WORD_BITS,
    BlockFloatTensor,
    PackedTensor,
    QuantizedTensor,
    ScaledTensor,
)
from sglang.srt.layers.triton_ops.arguments import MOST_FP4_SCALE
from sglang.srt.layers.weight_format import EXPONENTS, WeightFormat

FP8_MAX: Final = 448.0
"""The greatest number of e4m3."""
_INT4_MAX: Final = 7
_PLAIN: Final = re.compile(
    r"(^|\.)(lm_head|head|embed_tokens|embeddings|embed|compressor\.wkv|compressor\.wgate|gate|shared_expert_gate|router|kv_b_proj|weights_proj"
    r"|([qkv]_)?conv1d|in_proj_ba|in_proj_b|in_proj_a|b_proj|[fg]_[ab]_proj|eh_proj|fc"
    r"|\w*norm(?:_f)?)\.weight$"
)
_STACKED: Final = re.compile(r"\.experts\.((?:gate_)?up_proj|down_proj)$")


def is_rounded(name: str, config: QuantizationConfig) -> bool:
    """True for a weight that a format rounds: a matrix of a linear layer or of an expert, of MXFP4
    of an expert alone.

    Head, embedding, routers and other gates are left plain because results depend on them more than
    on others; convolutions and the up-projection of latent attention because no kernel multiplies
    them in a format; the input projection of a draft layer because published checkpoints do so.
    """
    is_weight = name.endswith(".weight") or _STACKED.search(name) is not None
    if config.packing is Packing.BLOCKS and OF_EXPERT not in name:
        return False
    return is_weight and _PLAIN.search(name) is None


def format_of_rounded(config: QuantizationConfig, dtype: torch.dtype) -> WeightFormat | None:
    """The format of the weights for which `is_rounded` is true; None: it has no rounding here.

    Args:
        dtype: The model's, in which scales of integers are kept.
    """
    if config.packing is Packing.NONE:
        return WeightFormat(block=config.block or (1, -1))
    if config.is_float4:
        assert config.block is not None
        return WeightFormat(bits=4, block=config.block, scales=EXPONENTS)
    if config.bits != 4 or config.is_reordered or dtype not in (torch.bfloat16, torch.float16):
        return None
    assert config.block is not None
    return WeightFormat(bits=4, block=config.block, scales=dtype)


def rounded(
    values: torch.Tensor, config: QuantizationConfig, dtype: torch.dtype, scales: torch.dtype
) -> QuantizedTensor:
    """A weight in the format `format_of_rounded` of a config, which is not None.

    Args:
        values: The whole weight, `[..., outputs, inputs]`.
        dtype: Dtype of the values that are read of the result.
        scales: Dtype that integers' scales are rounded to.

    Raises:
        ValueError: The format has 4 bits, and inputs are no multiple of 8, or of a group of floats.
    """
    *lead, outputs, inputs = values.shape
    of_block, of_group = config.block or (1, -1)
    height, width = outputs if of_block < 0 else of_block, inputs if of_group < 0 else of_group
    if config.packing is Packing.NONE:
        found = [_to_fp8(one, height, width) for one in values.reshape(-1, outputs, inputs)]
        elements, of_blocks = (torch.stack(each) for each in zip(*found, strict=True))
        grid = of_blocks.view(*lead, *of_blocks.shape[1:])
        return ScaledTensor(
            elements.view(values.shape), grid, (height, width), dtype, values.device
        )
    if config.is_float4:
        return _to_mxfp4(values, width, dtype)
    if lead or inputs % (WORD_BITS // 4):
        raise ValueError(
            f"random weights {list(values.shape)} cannot be rounded to 4 bits, of which a word has "
            "8: leave quantization_config out of config.json"
        )
    groups = F.pad(values.float(), (0, -inputs % width)).view(outputs, -1, width)
    most = groups.abs().amax(-1)
    of_groups = torch.where(most == 0, 1.0, most / _INT4_MAX).to(scales).float()
    integers = (groups / of_groups.unsqueeze(-1)).round_().clamp_(-8, _INT4_MAX).to(torch.int64)
    shifts = torch.arange(0, WORD_BITS, 4, device=values.device)
    by_word = (integers + 8).flatten(1)[:, :inputs].reshape(outputs, -1, len(shifts))
    return PackedTensor(
        (by_word << shifts).sum(-1).to(torch.int32),
        (outputs, inputs),
        Packing.ROWS,
        4,
        scales=of_groups,
        zeros=None,
        groups=torch.arange(inputs) // width,
        dtype=dtype,
        device=values.device,
    )


def _to_mxfp4(values: torch.Tensor, group: int, dtype: torch.dtype) -> BlockFloatTensor:
    """A scale is the power of two by which the greatest magnitude of its group lies in 4 to 8.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
    """
    inputs = values.shape[-1]
    if inputs % group:
        raise ValueError(
            f"random weights {list(values.shape)} cannot be rounded to MXFP4, which has groups of "
            f"{group} inputs: leave quantization_config out of config.json"
        )
    groups = values.float().view(*values.shape[:-1], -1, group)
    most = groups.abs().amax(-1)
    # frexp's fractions are in 0.5 to 1.
    exponents = torch.frexp(most).exponent - 3
    bits = torch.where(most == 0, 0, exponents + 127).clamp_(0, MOST_FP4_SCALE)
    scales = torch.tensor(E8M0, device=values.device)[bits.long()]
    table = torch.tensor(E2M1[: len(E2M1) // 2], device=values.device)
    # The boundaries between neighbours; a number on one goes to the even bits, as ties do.
    bounds = (table[1:] + table[:-1]) / 2
    parts = groups / scales.unsqueeze(-1)
    magnitudes = torch.bucketize(parts.abs(), bounds)
    is_tie = parts.abs() == torch.cat((bounds, bounds.new_tensor([torch.inf])))[magnitudes]
    magnitudes += is_tie & (magnitudes % 2 == 1)
    integers = (magnitudes + (parts < 0) * len(table)).to(torch.uint8)
    blocks = integers[..., ::2] | integers[..., 1::2] << 4
    return BlockFloatTensor(blocks, bits.to(torch.uint8), group, dtype, values.device)


def _to_fp8(matrix: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, e4m3, and scales of blocks, fp32."""
    outputs, inputs = matrix.shape
    padded = F.pad(matrix.float(), (0, -inputs % width, 0, -outputs % height))
    blocks = padded.view(-(-outputs // height), height, -(-inputs // width), width)
    most = blocks.abs().amax((1, 3))
    scales = torch.where(most == 0, 1.0, most / FP8_MAX)
    elements = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return elements.view(padded.shape)[:outputs, :inputs].contiguous(), scales

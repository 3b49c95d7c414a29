"""fp8 products by DeepGEMM, where its package is installed: of layers, and of many tokens' experts.

The grouped product multiplies tiles of 128 rows, and a tile has one expert. The rounded rows of all
uses are copied into the tiles of `ExpertTiles`; a token's sum reads the results there.

DeepGEMM compiles a kernel for the sizes of a product when it first runs, which takes seconds, and
keeps it on disk. It therefore gets only sizes that the warm-up meets: experts have as many rows as
the next power of two tokens needs, and layers as many tokens as a large graph or a whole chunk has.

Source of the library: https://github.com/deepseek-ai/DeepGEMM.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.environ import envs
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.expert_order import most_tiles, order_by_expert
from sglang.srt.layers.triton_ops.rounding import (
    empty_rounded,
    quantize_activations,
    quantize_gated,
)

logger = logging.getLogger(__name__)

Scaled = tuple[torch.Tensor, torch.Tensor]
"""fp8 elements and their scales."""
DenseProduct = Callable[[Scaled, Scaled, torch.Tensor], None]
"""`fp8_gemm_nt`: rows, of which the scales have a multiple of four, a weight, the result."""
GroupedProduct = Callable[[Scaled, Scaled, torch.Tensor, torch.Tensor], None]
"""`m_grouped_fp8_gemm_nt_contiguous`: rows, weights, the result, and the expert of each row, or
-1."""
PACKAGE: Final = "deep_gemm"
TILE_ROWS: Final = 128
_GROUP: Final = 128
_STEP_TOKENS: Final = range(193, 257)
_CHUNK: Final = 8192
"""Tokens of a layer's products: those of the largest graphs, and those of a whole chunk."""
_FEWEST_TOKENS: Final = 1024
"""Fewer are in graphs, whose capture cannot wait for a compiler."""
_FEWEST_USES: Final = 256
"""Fewest average uses of an expert: tiles are filled up to whole ones."""
_BLOCK: Final = 512


@triton.jit(do_not_specialize=["num_rows", "bound"])
def _place_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    places_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_rows: tl.tensor,
    bound: tl.tensor,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy BLOCK features of the rows of a tile, and their scales. The first program of a tile
    also writes each use's row, and each row's expert."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    nth = tl.arange(0, ROWS)
    to = tile.to(tl.int64) * ROWS + nth
    if tile >= tl.load(count_ptr):
        if block == 0:
            tl.store(experts_ptr + to, tl.full([ROWS], -1, tl.int32))
        return
    begin = tl.load(table_ptr + tile * 3 + 1)
    used = nth < tl.load(table_ptr + tile * 3 + 2)
    use = tl.load(order_ptr + begin + nth, mask=used, other=0)
    if block == 0:
        expert = tl.load(table_ptr + tile * 3)
        tl.store(experts_ptr + to, tl.zeros([ROWS], tl.int32) + expert)
        tl.store(places_ptr + use, to.to(tl.int32), mask=used)
    row = (use // TOP_K).to(tl.int64)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    inside = used[:, None] & (cols < K)[None, :]
    copied = tl.load(x_ptr + row[:, None] * K + cols[None, :], mask=inside, other=0)
    tl.store(out_ptr + to[:, None] * K + cols[None, :], copied, mask=inside)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    has_group = used[:, None] & (group < K // GROUP)[None, :]
    at = group.to(tl.int64)[None, :]
    scale = tl.load(x_scales_ptr + at * num_rows + row[:, None], mask=has_group, other=1.0)
    tl.store(scales_ptr + at * (bound * ROWS) + to[:, None], scale, mask=has_group)


@triton.jit
def _sum_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    stride: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(num_tokens, hidden_size / BLOCK)`: the weighted sum of a token's experts, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for nth in tl.static_range(TOP_K):
        is_own = tl.load(ids_ptr + token * TOP_K + nth) < EXPERTS
        place = tl.where(is_own, tl.load(places_ptr + token * TOP_K + nth), 0).to(tl.int64)
        used = cols < tl.where(is_own, HIDDEN, 0)
        part = tl.load(parts_ptr + place * HIDDEN + cols, mask=used, other=0.0)
        total += part.to(tl.float32) * tl.load(factors_ptr + token * stride + nth)
    to = out_ptr + token * HIDDEN + cols
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=cols < HIDDEN)


class Library(NamedTuple):
    """The library's products."""

    dense: DenseProduct
    grouped: GroupedProduct


def dense_product(tokens: int, weight: ScaledWeight, dtype: torch.dtype) -> DenseProduct | None:
    """The library's product, if it is there and the fastest; else None.

    Args:
        weight: `[outputs, inputs]`.
        dtype: Of the result.
    """
    is_met = tokens in _STEP_TOKENS or tokens == _CHUNK
    if not is_met or dtype != torch.bfloat16 or not _is_taken(weight):
        return None
    library = load_library(weight.elements.device)
    return library and library.dense


def grouped_product(uses: float, x: torch.Tensor, *weights: ScaledWeight) -> GroupedProduct | None:
    """The library's product, if it is there and the fastest; else None.

    Args:
        uses: Uses of an expert on average.
        x: `[num_tokens, hidden_size]`.
        weights: The experts' `[num_experts, outputs, inputs]`.
    """
    is_many = len(x) >= _FEWEST_TOKENS and uses >= _FEWEST_USES
    if not is_many or x.dtype != torch.bfloat16 or not all(map(_is_taken, weights)):
        return None
    library = load_library(x.device)
    return library and library.grouped


def _is_taken(weight: ScaledWeight) -> bool:
    is_whole = all(size % _GROUP == 0 for size in weight.shape[-2:])
    return weight.is_fp8 and is_whole and (weight.height, weight.group) == (_GROUP, _GROUP)


@functools.cache
def load_library(device: torch.device) -> Library | None:
    """The library after a trial of it, which compiles kernels; None: it is not installed, switched
    off, or fails, which the log says."""
    if not envs.SGLANG_ENABLE_JIT_DEEPGEMM.get() or importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        module = importlib.import_module(PACKAGE)
        library = Library(module.fp8_gemm_nt, module.m_grouped_fp8_gemm_nt_contiguous)
        found = _trial(library, device)
    # Its start asserts that there is a CUDA toolkit.
    except (ImportError, OSError, AttributeError, RuntimeError, AssertionError) as error:
        logger.warning("fp8 products without DeepGEMM, which fails here: %s", error)
        return None
    # GPUs after Hopper take scales that are powers of two.
    if not all(0.99 < one / (_GROUP * 0.3 * 0.7) < 1.01 for one in found):
        logger.warning("fp8 products without DeepGEMM, which gives others on %s", device)
        return None
    return library


def _trial(library: Library, device: torch.device) -> list[float]:
    """Elements of both products of ones, with scales of 0.3 and 0.7."""
    ones = torch.ones((TILE_ROWS, _GROUP), device=device).to(torch.float8_e4m3fn)
    scale = torch.full((1, TILE_ROWS), 0.3, device=device)
    out = torch.zeros((2, TILE_ROWS, _GROUP), dtype=torch.bfloat16, device=device)
    experts = torch.zeros(TILE_ROWS, dtype=torch.int32, device=device)
    rows, of_weight = (ones, scale.t()), scale.new_full((1, 1, 1), 0.7)
    library.dense(rows, (ones, of_weight[0]), out[0])
    library.grouped(rows, (ones[None], of_weight), out[1], experts)
    return out[:, -1, -1].tolist()


def run_in_tiles(
    product: GroupedProduct,
    x: torch.Tensor,
    factors: torch.Tensor,
    ids: torch.Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    *,
    has_others: bool,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in fp32; arguments as for
    `run_scaled_routed_experts` and `order_by_expert`."""
    placed, expert_of_row, places = _put_in_tiles(x, ids, gate_up, has_others=has_others)
    both = _multiply_in_tiles(product, placed, gate_up, expert_of_row, x.dtype)
    # A long prefill's tensors are large, so each ends with its last use.
    del placed
    gated = quantize_gated(both, _GROUP)
    del both
    parts = _multiply_in_tiles(product, gated, down, expert_of_row, x.dtype)
    return _sum_from_tiles(parts, ids, places, factors, down.shape[0])


def _put_in_tiles(
    x: torch.Tensor, ids: torch.Tensor, weight: ScaledWeight, *, has_others: bool
) -> tuple[Scaled, torch.Tensor, torch.Tensor]:
    """Round tokens, and copy them to the rows of their uses.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        ids: See `order_by_expert`; `has_others` likewise.
        weight: Of this rank's experts, `[num_experts, outputs, hidden_size]`.

    Returns:
        The rows; the expert of each, int32 `[rows]`, -1 in tiles without uses; and the row of each
        use, int32 like `ids`, not set for other ranks' experts. Other rows of a tile have any
        numbers.
    """
    tokens, top_k = ids.shape
    experts, features = weight.shape[0], weight.shape[2]
    tiles = order_by_expert(ids, experts, TILE_ROWS, has_others=has_others)
    given, given_scales = quantize_activations(x, _GROUP)
    bound = most_tiles(triton.next_power_of_2(tokens) * top_k, experts, TILE_ROWS)
    rows = bound * TILE_ROWS
    elements, scales = empty_rounded(rows, features, _GROUP, x.device)
    expert_of_row = torch.empty(rows, dtype=torch.int32, device=x.device)
    places = torch.empty(ids.shape, dtype=torch.int32, device=x.device)
    _place_kernel[(bound, triton.cdiv(features, _BLOCK))](
        given.view(torch.uint8), given_scales, elements.view(torch.uint8), scales, expert_of_row,
        places, tiles.order, tiles.table, tiles.count, tokens, bound,
        K=features, TOP_K=top_k, ROWS=TILE_ROWS, GROUP=_GROUP, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return (elements, scales), expert_of_row, places


def _multiply_in_tiles(
    product: GroupedProduct,
    x: Scaled,
    weight: ScaledWeight,
    expert_of_row: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each row of `_put_in_tiles` times its expert's weight: `[rows, outputs]` of `dtype`, bf16.
    Rows without uses have any numbers."""
    out = x[0].new_empty((len(x[0]), weight.shape[1]), dtype=dtype)
    product(x, (weight.elements, weight.scales), out, expert_of_row)
    return out


def _sum_from_tiles(
    parts: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    factors: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """The weighted sum of each token's rows, `[num_tokens, hidden_size]`, summed in fp32.

    Args:
        parts: `[rows, hidden_size]`.
        places: From `_put_in_tiles`, for `ids`.
        factors: fp32 `[num_tokens, top_k]`, of any stride between tokens.
        num_experts: Ids from here on add nothing.
    """
    (tokens, top_k), hidden = ids.shape, parts.shape[1]
    out = torch.empty((tokens, hidden), dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, out, ids, places, factors, factors.stride(0),
        HIDDEN=hidden, TOP_K=top_k, EXPERTS=num_experts, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out

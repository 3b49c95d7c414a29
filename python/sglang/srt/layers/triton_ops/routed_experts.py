"""Experts for many tokens: two products of tiles of uses, and the sum of each token's experts.

A program of a product multiplies some weights of an expert with all rows of a tile
(`expert_order`), which it gathers as it reads. Weights are the left operand: they have enough rows
for tensor cores even where a tile has few. The results have a row for each use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.triton_ops.arguments import ExpertActivation, ExpertBiases
from sglang.srt.layers.triton_ops.expert_order import ExpertTiles, order_by_expert
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the programs of a product divide it."""

    outputs: int
    """Features that a program computes."""
    depth: int
    """Features that it multiplies at a time."""
    group: int
    """Tiles whose programs follow each other with the same features, for weights to be shared in
    the L2 cache."""
    warps: int
    stages: int
    """Weights read ahead, in units of `depth`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes for batches of so many uses of an expert."""

    most_uses: float
    """Most uses of an expert on average."""
    tile_rows: int
    gate_up: Blocks
    down: Blocks


# Field by field: most uses, rows of a tile, then outputs, depth, group, warps and stages.
_PLANS: Final = (
    Plan(12.0, 16, Blocks(64, 128, 1, 4, 3), Blocks(128, 128, 1, 4, 3)),
    Plan(24.0, 32, Blocks(64, 64, 1, 4, 4), Blocks(128, 64, 1, 4, 4)),
    Plan(96.0, 64, Blocks(64, 64, 4, 4, 4), Blocks(128, 64, 1, 4, 3)),
    Plan(256.0, 128, Blocks(128, 64, 8, 8, 4), Blocks(128, 64, 8, 4, 3)),
    Plan(float("inf"), 128, Blocks(128, 64, 8, 8, 3), Blocks(128, 64, 8, 4, 3)),
)
"""Measured on an H200 with the shapes of Qwen3-Next and DeepSeek-V3.2
(benchmark/results/2026-11-26-gpu-hybrid-compute.md)."""
_PLAN_OF_FP32: Final = Plan(float("inf"), 16, Blocks(64, 32, 4, 4, 2), Blocks(64, 32, 4, 4, 2))
"""Products of fp32 are sums of three products of tf32, which take more registers."""
_SUM_BLOCK: Final = 1024
"""Most features of a token that a program sums."""


def plan_of(uses: float, dtype: torch.dtype) -> Plan:
    """The plan for `uses` of an expert on average."""
    if dtype == torch.float32:
        return _PLAN_OF_FP32
    return next(plan for plan in _PLANS if uses <= plan.most_uses)


@triton.jit
def tile_of_program(
    table_ptr: tl.tensor, bound: tl.tensor, BLOCKS: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Tile and block of this program, of a grid of `bound * BLOCKS`, and the tile's row of
    `ExpertTiles.table`. Programs of GROUP tiles with the same block follow each other."""
    group = tl.program_id(0) // (GROUP * BLOCKS)
    within = tl.program_id(0) % (GROUP * BLOCKS)
    first = group * GROUP
    size = tl.minimum(bound - first, GROUP)
    tile = first + within % size
    expert = tl.load(table_ptr + tile * 3)
    begin = tl.load(table_ptr + tile * 3 + 1)
    num_rows = tl.load(table_ptr + tile * 3 + 2)
    return tile, within // size, expert, begin, num_rows


@triton.jit
def uses_of_tile(
    order_ptr: tl.tensor, begin: tl.tensor, num_rows: tl.tensor, TILE_ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which rows of a tile have a use, and the uses, int64."""
    nth = tl.arange(0, TILE_ROWS)
    used = nth < num_rows
    return used, tl.load(order_ptr + begin + nth, mask=used, other=0).to(tl.int64)


@triton.jit
def load_weights(
    weights: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    begin: tl.tensor,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
) -> tl.tensor:
    """Load COLS columns from `begin` on, of ROWS rows of SIZE from `first` on. Columns beyond SIZE
    are zeros, rows from `end` on have any numbers."""
    if TMA:
        loaded = weights.load([first, begin])
    else:
        rows = tl.minimum(first + tl.arange(0, ROWS), end - 1).to(tl.int64)
        cols = tl.arange(0, COLS)
        at = weights + rows[:, None] * SIZE + cols[None, :] + begin
        if SIZE % COLS == 0:
            loaded = tl.load(at)
        else:
            loaded = tl.load(at, mask=(cols < SIZE - begin)[None, :], other=0.0)
    return loaded


@triton.jit
def load_rows(
    at: tl.tensor,
    used: tl.tensor,
    cols: tl.tensor,
    begin: tl.tensor,
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
) -> tl.tensor:
    """Load `cols` from `begin` on, of a tile's rows of SIZE, transposed; zeros for unused rows. If
    COLS divides SIZE, all columns are inside."""
    if SIZE % COLS == 0:
        loaded = tl.load(at + begin, mask=used[None, :], other=0.0)
    else:
        inside = cols < SIZE - begin
        loaded = tl.load(at + begin, mask=used[None, :] & inside[:, None], other=0.0)
    return loaded


@triton.jit(do_not_specialize=["bound"])
def _gate_up_kernel(
    x_ptr: tl.tensor,
    gate_up: tl.tensor,
    inner_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    bound: tl.tensor,
    bias_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """Compute `silu(gate) * up`, with LIMIT a clamped gate, or without a gate max(up, 0)^2, of
    BLOCK_F features for the rows of one tile. BIAS comes with LIMIT."""
    tile, block, expert, begin, num_rows = tile_of_program(
        table_ptr, bound, tl.cdiv(FEATURES, BLOCK_F), GROUP
    )
    if tile >= tl.load(count_ptr):
        return
    used, uses = uses_of_tile(order_ptr, begin, num_rows, TILE_ROWS)
    x_at = x_ptr + (uses // TOP_K * HIDDEN)[None, :] + tl.arange(0, BLOCK_H)[:, None]
    matrices: tl.constexpr = 2 if GATED else 1
    first = expert * matrices * FEATURES + block * BLOCK_F
    end = (expert * matrices + 1) * FEATURES
    gate = tl.zeros([BLOCK_F, TILE_ROWS], tl.float32)
    up = tl.zeros([BLOCK_F, TILE_ROWS], tl.float32)
    for k in range(0, HIDDEN, BLOCK_H):
        # Weights first: their place is known before that of the rows.
        if GATED:
            of_gate = load_weights(gate_up, first, end, k, BLOCK_F, HIDDEN, BLOCK_H, TMA)
            of_up = load_weights(
                gate_up, first + FEATURES, end + FEATURES, k, BLOCK_F, HIDDEN, BLOCK_H, TMA
            )
            x = load_rows(x_at, used, tl.arange(0, BLOCK_H), k, HIDDEN, BLOCK_H)
            gate = tl.dot(of_gate, x, gate, input_precision="tf32x3")
        else:
            of_up = load_weights(gate_up, first, end, k, BLOCK_F, HIDDEN, BLOCK_H, TMA)
            x = load_rows(x_at, used, tl.arange(0, BLOCK_H), k, HIDDEN, BLOCK_H)
        up = tl.dot(of_up, x, up, input_precision="tf32x3")
    if LIMIT > 0:
        if BIAS:
            own = tl.minimum(block * BLOCK_F + tl.arange(0, BLOCK_F), FEATURES - 1)
            at = bias_ptr + expert * 2 * FEATURES + own
            gate += tl.load(at).to(tl.float32)[:, None]
            up += tl.load(at + FEATURES).to(tl.float32)[:, None]
        inner = clamped_gate(gate, up, LIMIT, ALPHA, SHIFT)
    elif GATED:
        inner = gate / (1.0 + tl.exp(-gate)) * up
    else:
        inner = tl.maximum(up, 0.0)
        inner *= inner
    features = block * BLOCK_F + tl.arange(0, BLOCK_F)
    to = inner_ptr + (uses * FEATURES)[None, :] + features[:, None]
    stored = used[None, :] & (features < FEATURES)[:, None]
    tl.store(to, inner.to(inner_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["bound", "stride"])
def _down_kernel(
    inner_ptr: tl.tensor,
    down: tl.tensor,
    weights_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    bound: tl.tensor,
    stride: tl.tensor,
    bias_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Compute BLOCK_H features of the weighted output for the rows of one tile."""
    tile, block, expert, begin, num_rows = tile_of_program(
        table_ptr, bound, tl.cdiv(HIDDEN, BLOCK_H), GROUP
    )
    if tile >= tl.load(count_ptr):
        return
    used, uses = uses_of_tile(order_ptr, begin, num_rows, TILE_ROWS)
    inner_at = inner_ptr + (uses * FEATURES)[None, :] + tl.arange(0, BLOCK_F)[:, None]
    first = expert * HIDDEN + block * BLOCK_H
    end = (expert + 1) * HIDDEN
    part = tl.zeros([BLOCK_H, TILE_ROWS], tl.float32)
    for k in range(0, FEATURES, BLOCK_F):
        weights = load_weights(down, first, end, k, BLOCK_H, FEATURES, BLOCK_F, TMA)
        inner = load_rows(inner_at, used, tl.arange(0, BLOCK_F), k, FEATURES, BLOCK_F)
        part = tl.dot(weights, inner, part, input_precision="tf32x3")
    if BIAS:
        own = tl.minimum(block * BLOCK_H + tl.arange(0, BLOCK_H), HIDDEN - 1)
        part += tl.load(bias_ptr + expert * HIDDEN + own).to(tl.float32)[:, None]
    scales_at = weights_ptr + uses // TOP_K * stride + uses % TOP_K
    part *= tl.load(scales_at, mask=used, other=0.0)[None, :]
    features = block * BLOCK_H + tl.arange(0, BLOCK_H)
    to = parts_ptr + (uses * HIDDEN)[None, :] + features[:, None]
    stored = used[None, :] & (features < HIDDEN)[:, None]
    tl.store(to, part.to(parts_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _sum_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(num_tokens, hidden_size / BLOCK)`: sum the outputs of a token's experts in fp32.
    OTHERS: there are no outputs of experts from EXPERTS on."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < HIDDEN
    used = inside
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        at = parts_ptr + (token * TOP_K + place) * HIDDEN + cols
        if OTHERS:
            expert = tl.load(ids_ptr + token * TOP_K + place)
            used = cols < tl.where(expert < EXPERTS, HIDDEN, 0)
        total += tl.load(at, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def multiply_gate_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    tiles: ExpertTiles,
    blocks: Blocks,
    *,
    activation: ExpertActivation = "silu",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first products of all uses, activated.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        gate_up: Contiguous `[num_experts, 2 * features, hidden_size]`; without a gate half as many
            rows.
        bias: `[num_experts, 2 * features]`, with a clamped gate; None: there is none.

    Returns:
        `[num_uses, features]` of the dtype of `x`.
    """
    assert x.is_contiguous() and gate_up.is_contiguous()
    is_gated, rule = activation != "squared_relu", rule_of(activation)
    assert bias is None or (bias.is_contiguous() and rule["LIMIT"])
    hidden, features = x.shape[1], gate_up.shape[1] // (2 if is_gated else 1)
    inner = torch.empty((len(tiles.order), features), dtype=x.dtype, device=x.device)
    outputs, depth = _fitting(blocks.outputs, features), _fitting(blocks.depth, hidden)
    tma = _tma_takes(gate_up)
    _gate_up_kernel[(tiles.bound * triton.cdiv(features, outputs),)](
        x,
        _described(gate_up, outputs, depth) if tma else gate_up,
        inner,
        tiles.order,
        tiles.table,
        tiles.count,
        tiles.bound,
        x if bias is None else bias,
        HIDDEN=hidden,
        FEATURES=features,
        TOP_K=tiles.top_k,
        TILE_ROWS=tiles.rows,
        BLOCK_F=outputs,
        BLOCK_H=depth,
        GROUP=blocks.group,
        TMA=tma,
        GATED=is_gated,
        BIAS=bias is not None,
        **rule,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return inner


def multiply_down(
    inner: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    tiles: ExpertTiles,
    blocks: Blocks,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second products of all uses, multiplied by the weights of the uses.

    Args:
        inner: From `multiply_gate_up`.
        down: Contiguous `[num_experts, hidden_size, features]`.
        weights: fp32 `[num_tokens, top_k]`.
        bias: `[num_experts, hidden_size]`; None: there is none.

    Returns:
        `[num_uses, hidden_size]` of the dtype of `inner`.
    """
    assert inner.is_contiguous() and down.is_contiguous() and weights.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    hidden, features = down.shape[1:]
    parts = torch.empty((len(inner), hidden), dtype=inner.dtype, device=inner.device)
    outputs, depth = _fitting(blocks.outputs, hidden), _fitting(blocks.depth, features)
    tma = _tma_takes(down)
    _down_kernel[(tiles.bound * triton.cdiv(hidden, outputs),)](
        inner,
        _described(down, outputs, depth) if tma else down,
        weights,
        parts,
        tiles.order,
        tiles.table,
        tiles.count,
        tiles.bound,
        weights.stride(0),
        inner if bias is None else bias,
        HIDDEN=hidden,
        FEATURES=features,
        TOP_K=tiles.top_k,
        TILE_ROWS=tiles.rows,
        BLOCK_H=outputs,
        BLOCK_F=depth,
        GROUP=blocks.group,
        TMA=tma,
        BIAS=bias is not None,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return parts


def sum_of_uses(
    parts: torch.Tensor, ids: torch.Tensor, num_experts: int, *, has_others: bool = False
) -> torch.Tensor:
    """`[num_tokens * top_k, hidden_size]` to `[num_tokens, hidden_size]`, summed in fp32; other
    arguments as for `order_by_expert`."""
    (num_tokens, top_k), hidden = ids.shape, parts.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=parts.dtype, device=parts.device)
    block = min(_SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        parts, out, ids,
        HIDDEN=hidden, TOP_K=top_k, EXPERTS=num_experts, OTHERS=has_others, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _fitting(block: int, size: int) -> int:
    """A block no larger than `size` needs; tensor cores take at least 16."""
    whole: int = triton.next_power_of_2(size)
    return max(16, min(block, whole))


def _tma_takes(weights: torch.Tensor) -> bool:
    """True if the rows are whole 16 bytes."""
    return weights.shape[-1] * weights.element_size() % 16 == 0


def _described(weights: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """All experts' rows, to be read in blocks; what lies beyond the last is zeros."""
    return TensorDescriptor.from_tensor(weights.flatten(0, 1), [rows, cols])


def run_routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in fp32; bits are the same in each run.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: fp32 `[num_tokens, top_k]`, of any stride between tokens.
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype.
        gate_up: See `ExpertWeights`; `down` likewise.
        num_experts: Experts of all ranks; ids from `len(gate_up)` on are other ranks', and add
            nothing. None: this rank has all.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    own, total = len(gate_up), num_experts or len(gate_up)
    plan = plan_of(ids.numel() / total, x.dtype)
    tiles = order_by_expert(ids, own, plan.tile_rows, has_others=own < total)
    first, last = (None, None) if biases is None else biases
    inner = multiply_gate_up(x, gate_up, tiles, plan.gate_up, activation=activation, bias=first)
    parts = multiply_down(inner, down, weights, tiles, plan.down, last)
    return sum_of_uses(parts, ids, own, has_others=own < total)

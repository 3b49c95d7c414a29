"""Compression of groups of tokens to rows.

Each token gives values and gates. A row is the average of its group's values, channel by channel,
weighted by the softmax of gates; then it is normalised, and rotated as the group's first token. In
layers with an overlap, a token has values and gates for two rows: a first half for the row of the
next group, a second half for the row of its own group. A row then reads the tokens of two groups.

Later steps read earlier tokens from two pools. One has the tokens of an unfinished group, for each
running request. The other has the first half of the last finished group, for each state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang.srt.layers.compressed.group_plan import GroupPlan, states_of
from sglang.srt.layers.compressed.rotation import rotate_last
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.layernorm import WideRMSNorm
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.mem_cache.device.state_spec import PoolName


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorOptions:
    """Sizes of one compressor, and the pools that it uses."""

    ratio: int
    """Tokens of a group."""
    dim: int
    """Elements of a row."""
    eps: float
    open_pool: PoolName
    """Pool of the tokens of unfinished groups."""
    overlap_pool: PoolName | None
    """Pool of the last group's tokens; None: a row reads its own group alone."""
    buffer: int
    """Index of the compressor's buffer in both pools."""

    @property
    def width(self) -> int:
        """Values that a token gives; it has as many gates."""
        return self.dim if self.overlap_pool is None else 2 * self.dim

    def projections(self, prefix: str) -> list[tuple[str, Share]]:
        """Names and outputs of the projections that give a token's values and gates. The layer
        multiplies them with others of the same input.

        Args:
            prefix: The compressor's name below the layer's.
        """
        whole = Share(0, self.width, self.width)
        return [(f"{prefix}.wkv", whole), (f"{prefix}.wgate", whole)]


class _Position(WeightedLayer):
    """Added to the gates by a token's place in its group, `[ratio, width]`, in fp32."""

    def __init__(self, options: CompressorOptions, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.weight = replace(placement, dtype=torch.float32).empty(options.ratio, options.width)

    def weight_slots(self) -> NamedSlots:
        yield self.prefix, WeightSlot.of(self.weight)


class GroupCompressor(torch.nn.Module):
    """Makes one kind of row in one layer; the same on every rank."""

    def __init__(
        self, options: CompressorOptions, placement: TensorPlacement, layer_id: int
    ) -> None:
        super().__init__()
        self.options, self.layer_id = options, layer_id
        self.position = _Position(options, placement.at("ape"))
        self.norm = WideRMSNorm(options.dim, options.eps, placement=placement.at("norm"))

    def rows(
        self, tokens: torch.Tensor, plan: GroupPlan, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The rows of the groups that a step finishes, `[groups, dim]`. Keeps what later steps
        need of its tokens.

        Args:
            tokens: `[num_tokens, 2 * width]`: outputs of `CompressorOptions.projections`.
        """
        assert plan.rotation is not None, "`plan_rows` sets it"
        states, rows = states_of(forward_batch), forward_batch.req_pool_indices
        opened = self.buffer(self.options.open_pool, forward_batch)
        found = opened[rows[plan.open_requests], plan.open_places]
        sources = torch.cat([tokens, found]) if len(found) else tokens
        values, gates = sources.chunk(2, dim=1)
        place = self.position.weight
        dim = self.options.dim
        # The last `dim` columns are for the row of the token's own group.
        row_values = values[:, -dim:][plan.current]
        row_gates = gates[:, -dim:][plan.current] + place[:, -dim:]
        if self.options.overlap_pool is not None:
            kept = self.buffer(self.options.overlap_pool, forward_batch)
            last = kept[states.read_slots[plan.last_requests], plan.last_places]
            first = torch.cat([values[:, :dim], gates[:, :dim]], dim=1)
            if states.first_slots is not None:
                kept.index_copy_(0, states.slots, kept.index_select(0, states.first_slots))
            kept.index_copy_(0, states.slots[plan.ended], first[plan.ended_sources])
            if states.track_slots is not None:
                targets = states.track_slots.index_select(0, plan.tracked)
                kept.index_copy_(0, targets, first[plan.tracked_sources])
            before = torch.cat([first, last]) if len(last) else first
            old_values, old_gates = before[plan.previous].chunk(2, dim=2)
            old_gates = (old_gates + place[:, :dim]).masked_fill(plan.is_first, -torch.inf)
            row_values = torch.cat([old_values, row_values], dim=1)
            row_gates = torch.cat([old_gates, row_gates], dim=1)
        slots = rows[plan.kept_requests], plan.kept_places
        opened.index_put_(slots, tokens.index_select(0, plan.kept_tokens))
        weights = F.softmax(row_gates, dim=1, dtype=torch.float32).to(row_values.dtype)
        return rotate_last(self.norm.forward((row_values * weights).sum(dim=1)), plan.rotation)

    def buffer(self, name: PoolName, forward_batch: ForwardBatch) -> torch.Tensor:
        """`[slots, tokens, 2 * values]` of the layer. Waits for a load that fills it."""
        assert forward_batch.pools is not None, "the runner sets it before the model runs"
        pool = forward_batch.pools[name]
        return pool.parts[self.options.buffer][pool.wait_for_layer(self.layer_id)]

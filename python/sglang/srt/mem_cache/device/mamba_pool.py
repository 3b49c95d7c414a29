"""Recurrent states of linear attention, which the delta-net layers of a model keep of a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    RankShare,
    StateBuffer,
    StateSpec,
)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateSpec):
    """The state of linear attention: `temporal` and `conv`, in the delta-net layers."""

    name: PoolName = PoolName.MAMBA
    item: ItemKind = ItemKind.STATE
    hit_policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES

    @classmethod
    def of_shapes(
        cls,
        layers: tuple[int, ...],
        temporal: tuple[int, int, int],
        conv: tuple[int, int],
        *,
        ssm_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        share: RankShare | None = None,
    ) -> MambaSpec:
        """The spec of states of these shapes.

        Args:
            layers: The delta-net layers.
            temporal: Shape on one rank: value heads, elements of a key, elements of a value.
            conv: Shape on one rank: channels (all queries, all keys, all values), inputs before the
                next token that the convolution reads.
            share: The model's heads that these are; None: all of them.
        """
        heads, key_dim, value_dim = temporal
        values = heads * value_dim
        keys, rest = divmod(conv[0] - values, 2)
        # It is not known how to split other channels than queries, keys and values of such heads.
        is_known = rest == 0 and keys > 0 and keys % key_dim == 0
        return cls(
            layers=layers,
            buffers=(
                StateBuffer("temporal", temporal, ssm_dtype, (heads,)),
                StateBuffer("conv", conv, conv_dtype, (keys, keys, values) if is_known else ()),
            ),
            share=share or RankShare(),
        )


class MambaPool(StatePool):
    """Slots of the recurrent states of linear attention."""

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.MambaPoolHost"

    @property
    def temporal(self) -> torch.Tensor:
        """`[layers, size + 1, heads, key elements, value elements]`."""
        return self.buffers[0]

    @property
    def conv(self) -> torch.Tensor:
        """`[layers, size + 1, channels, kernel - 1]`."""
        return self.buffers[1]

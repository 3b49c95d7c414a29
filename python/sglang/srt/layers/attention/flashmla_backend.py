"""Sparse latent attention (DSA) on CUDA: FlashMLA's kernel reads the chosen rows of many tokens, of
prefills and of decode steps.

All else is `LatentTritonBackend`.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.flashmla_library import (
    MULTIPLE,
    SparsePrefill,
    beside_each_other,
    load_kernel,
    refusal_of,
)
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend, SlotLists
from sglang.srt.layers.mla.latent_attention import LatentAttention

RANK: Final = 512
"""Elements of a latent vector, the only size that the kernel reads."""
_HEADS: Final = 64
"""Heads come in multiples of this; others are padded with zeros."""
_FEWEST_BLOCKS: Final = 48
"""Fewest tokens times blocks of heads. Fewer do not fill the device: the kernel does not split a
token's rows over programs."""
MASKED_CONTEXT: Final = 5120
"""Tokens before this position attend under a mask; see `latent_triton_backend.MASKED_CONTEXT`."""


class FlashMLABackend(LatentTritonBackend):
    """`LatentTritonBackend`, but FlashMLA reads the chosen rows of many tokens.

    Raises:
        ValueError: See `load_kernel`.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config, MASKED_CONTEXT)
        self._kernel = load_kernel()

    def warm_up(self) -> None:
        """Raises:
        ValueError: The GPU does not run the kernel.
        """
        super().warm_up()
        device, dtype, mla = self._config.device, self._config.dtype, self._config.mla
        assert mla is not None, "its layers have latent attention"
        width = RANK + mla.qk_rope_head_dim
        query = torch.zeros((_FEWEST_BLOCKS, _HEADS, width), dtype=dtype, device=device)
        chosen = torch.zeros((len(query), MULTIPLE), dtype=torch.int32, device=device)
        try:
            sparse_attention(self._kernel, query, query[:1, :1], chosen, 1.0)
        except RuntimeError as error:
            raise refusal_of(device, error) from error

    def _attend_chosen(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        pool: torch.Tensor,
        chosen: torch.Tensor,
        lists: SlotLists,
        table: torch.Tensor,
    ) -> torch.Tensor:
        if len(q) * -(-layer.num_heads // _HEADS) < _FEWEST_BLOCKS:
            return super()._attend_chosen(q, layer, pool, chosen, lists, table)
        heads, nope = layer.num_heads, layer.mla.qk_nope_head_dim
        query = q.new_empty((len(q), heads + -heads % _HEADS, pool.shape[-1]))
        absorbed = query[:, :heads, :RANK].transpose(0, 1)
        layer.up_projection.absorb(q[..., :nope].transpose(0, 1), out=absorbed)
        query[:, :heads, RANK:] = q[..., nope:]
        if heads < query.shape[1]:
            query[:, heads:] = 0
        if self._group > 1:
            chosen = _slots_of_groups(chosen, lists, table, self._group)
        rows = beside_each_other(chosen)
        found = sparse_attention(self._kernel, query, pool, rows, layer.scaling)
        return found[:, :heads]


def _slots_of_groups(
    chosen: torch.Tensor, lists: SlotLists, table: torch.Tensor, size: int
) -> torch.Tensor:
    """The slots of chosen groups and of open groups, int32; -1 is none.

    Args:
        chosen: int32 `[n, k]`: items of groups of `size` tokens; -1 is none.
        lists: Lists of the tokens in `table`, an open group at the end of each.
    """
    places = torch.arange(size, dtype=torch.int32, device=chosen.device)
    items = chosen.unsqueeze(-1)
    slots = torch.where(items < 0, -1, items * size + places).flatten(1)
    lens = lists.lens.unsqueeze(1)
    at = lens // size * size + places[:-1]
    open_slots = table[lists.rows.unsqueeze(1), at.clamp(max=table.shape[1] - 1)]
    return torch.cat((slots, torch.where(at < lens, open_slots, -1)), dim=1)


def sparse_attention(
    kernel: SparsePrefill,
    query: torch.Tensor,
    pool: torch.Tensor,
    chosen: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend from tokens to chosen rows by FlashMLA's kernel. Tensors are contiguous.

    Args:
        kernel: Result of `load_kernel`.
        query: bf16 `[num_tokens, num_heads, 576]`: absorbed, then rotated; a multiple of 64 heads.
            512 elements if nothing is rotated.
        pool: bf16 `[slots, 1, 576]`, or 512.
        chosen: int32 `[num_tokens, topk]`; `topk` is a multiple of 128. -1 is no row.
        scaling: Factor of the scores.

    Returns:
        bf16 `[num_tokens, num_heads, 512]`.
    """
    # The last two, sinks and lengths, have defaults in one of the libraries alone.
    out, *_ = kernel(query, pool, chosen.unsqueeze(1), scaling, RANK, None, None)
    return out

"""Sparse latent attention (DSA) on CUDA: FlashMLA's kernel reads the chosen rows of many tokens, of
prefills and of decode steps.

All else is `LatentTritonBackend`.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.flashmla_library import SparsePrefill, load_kernel
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend, SlotLists
from sglang.srt.layers.mla.latent_attention import LatentAttention

RANK, ROPE = 512, 64
"""The only rows that the kernel reads, in elements of bf16: latent vector, rotated part."""
_HEADS: Final = 64
"""Heads come in multiples of this; others are padded with zeros."""
_CHOSEN: Final = 128
"""Chosen rows come in multiples of this."""
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
        device, dtype = self._config.device, self._config.dtype
        query = torch.zeros((_FEWEST_BLOCKS, _HEADS, RANK + ROPE), dtype=dtype, device=device)
        chosen = torch.zeros((len(query), _CHOSEN), dtype=torch.int32, device=device)
        try:
            sparse_attention(self._kernel, query, query[:1, :1], chosen, 1.0)
        except RuntimeError as error:
            raise ValueError(
                f"attention backend 'flashmla' does not run on {device!r} ({error}): use triton"
            ) from error

    def _attend_chosen(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        pool: torch.Tensor,
        chosen: torch.Tensor,
        lists: SlotLists,
        table: torch.Tensor,
    ) -> torch.Tensor:
        topk = chosen.shape[1]
        if len(q) * -(-layer.num_heads // _HEADS) < _FEWEST_BLOCKS or topk % _CHOSEN:
            return super()._attend_chosen(q, layer, pool, chosen, lists, table)
        heads, nope = layer.num_heads, layer.mla.qk_nope_head_dim
        query = q.new_empty((len(q), heads + -heads % _HEADS, RANK + ROPE))
        absorbed = query[:, :heads, :RANK].transpose(0, 1)
        layer.up_projection.absorb(q[..., :nope].transpose(0, 1), out=absorbed)
        query[:, :heads, RANK:] = q[..., nope:]
        if heads < query.shape[1]:
            query[:, heads:] = 0
        found = sparse_attention(self._kernel, query, pool, chosen, layer.scaling)
        return found[:, :heads]


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
        pool: bf16 `[slots, 1, 576]`.
        chosen: int32 `[num_tokens, topk]`; `topk` is a multiple of 128. -1 is no row.
        scaling: Factor of the scores.

    Returns:
        bf16 `[num_tokens, num_heads, 512]`.
    """
    # The last two, sinks and lengths, have defaults in one of the libraries alone.
    out, *_ = kernel(query, pool, chosen.unsqueeze(1), scaling, RANK, None, None)
    return out

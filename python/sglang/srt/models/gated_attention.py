"""Full attention of the delta-net hybrids: normed heads, partial rotation, a gated output."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.fused_kernels import FusedKernels, fused_kernels
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary


class GatedAttention(torch.nn.Module):
    """Grouped-query attention whose output is scaled by the sigmoid of a projection."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement, layer_id: int) -> None:
        super().__init__()
        placement = placement.at("self_attn")
        heads = placement.share(config.num_attention_heads, "attention heads")
        kv_heads = placement.kv_head_share(config.num_key_value_heads)
        self.head_dim = config.head_dim
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        # Each head's query is followed by its gate.
        self.qkv_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [("q_proj", heads.times(2 * self.head_dim)), ("k_proj", kv), ("v_proj", kv)],
            bias=bias,
            placement=placement,
        )
        self.o_proj = RowParallelLinear(
            q, config.hidden_size, bias=bias, placement=placement.at("o_proj")
        )
        eps = config.rms_norm_eps
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=placement.at("q_norm"))
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=placement.at("k_norm"))
        self.attn = RadixAttention(
            heads.size, self.head_dim, self.head_dim**-0.5, kv_heads.size, layer_id
        )
        self._kernels = fused_kernels(placement.device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None,
    ) -> tuple[ToAdd, torch.Tensor]:
        """Attend, then project towards the residual: see `RowParallelLinear.forward`.

        Args:
            x: `[num_tokens, hidden_size]`.
            rows: int64 `[bs]`: tokens whose output is wanted; None: all.
        """
        attn = self.attn
        qkv = self.qkv_proj.forward(x).view(len(x), -1, self.head_dim)
        sizes = [2 * attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
        queries, k, v = torch.split(qkv, sizes, dim=1)
        q, gates = queries[:, ::2], queries[:, 1::2]
        is_stored = self._kernels is not None
        if self._kernels is not None:
            q = self._prepare(self._kernels, qkv, rotation, forward_batch)
        else:
            q = apply_rotary(self.q_norm.forward(q), rotation)
            k = apply_rotary(self.k_norm.forward(k), rotation)
        attended = attn.forward(
            q, k, v, forward_batch, save_kv_cache=not is_stored, rows=rows, gates=gates
        )
        if rows is not None:
            residual = residual.index_select(0, rows)
        return self.o_proj.forward(attended, residual)

    def _prepare(
        self,
        kernels: FusedKernels,
        qkv: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Queries, from the projections `[num_tokens, ..., head_dim]`; keys in place, and stored
        with the values."""
        return kernels.prepare_gated_qkv_(
            qkv,
            (self.q_norm.weight, self.k_norm.weight),
            self.q_norm.eps,
            (rotation.cos, rotation.signed_sin),
            forward_batch.out_cache_loc,
            *forward_batch.token_to_kv_pool.kv_buffer_to_write(self.attn.layer_id),
        )

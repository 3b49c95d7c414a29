"""Full attention of the delta-net hybrids: normed heads, partial rotation, a gated output."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.fused_kernels import FusedKernels, fused_kernels
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary
from sglang.srt.models.llama import DecoderOptions, LlamaAttention


class GatedAttention(LlamaAttention):
    """Grouped-query attention whose output is scaled by the sigmoid of a projection."""

    # Each head's query is followed by its gate.
    outputs_per_query = 2

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        placement: TensorPlacement,
        layer_id: int,
    ) -> None:
        super().__init__(config, options, placement, layer_id)
        own, eps = placement.at("self_attn"), config.rms_norm_eps
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=own.at("q_norm"))
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=own.at("k_norm"))
        self._kernels = fused_kernels(placement.device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None,
    ) -> tuple[ToAdd, torch.Tensor]:
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
        """Normalise and rotate queries (returned) and keys (in place) of the projections
        `[num_tokens, ..., head_dim]`, and store keys and values."""
        return kernels.prepare_gated_qkv_(
            qkv,
            (self.q_norm.weight, self.k_norm.weight),
            self.q_norm.eps,
            (rotation.cos, rotation.signed_sin),
            forward_batch.out_cache_loc,
            *forward_batch.token_to_kv_pool.kv_buffer_to_write(self.attn.layer_id),
        )

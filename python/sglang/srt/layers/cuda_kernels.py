"""The fused kernels of CUDA devices; `layers/fused_kernels.py` hands them out."""

from __future__ import annotations

from typing import Final

from sglang.srt.layers.triton_ops import (
    chunked_delta_net,
    expert_choice,
    fused_delta_net,
    fused_qkv,
    gating,
    norm,
    rotation,
    verified_delta_net,
    vocab,
)
from sglang.srt.layers.triton_ops import gemv as gemvs
from sglang.srt.layers.triton_ops.attention.pooled_keys import store_pooled_keys
from sglang.srt.layers.triton_ops.compressed import rotated_norm
from sglang.srt.layers.triton_ops.hyper import streams
from sglang.srt.layers.triton_ops.kda import chunks as kda_chunks
from sglang.srt.layers.triton_ops.kda import tokens as kda_tokens
from sglang.srt.layers.triton_ops.mamba import chunks, tokens
from sglang.srt.layers.triton_ops.scaled import experts, shared_expert
from sglang.srt.layers.triton_ops.scaled import gemv as scaled_gemvs
from sglang.srt.layers.triton_ops.scaled.linear import (
    add_and_round_,
    multiply_scaled,
    multiply_together,
    round_rows,
)


class FusedKernels:
    """Functions on tensors of the device. Their modules have the contracts."""

    silu_and_mul = staticmethod(gating.silu_and_mul)
    scale_by_gates_ = staticmethod(gating.scale_by_gates_)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm_ = staticmethod(norm.add_rms_norm_)
    add_and_round_ = staticmethod(add_and_round_)
    add_parts_rms_norm_ = staticmethod(norm.add_parts_rms_norm_)
    look_up_share = staticmethod(vocab.look_up_share)
    argmax = staticmethod(vocab.argmax)
    argmax_of_ranks = staticmethod(vocab.argmax_of_ranks)
    plan_gemv = staticmethod(gemvs.plan)
    gemv = staticmethod(gemvs.gemv)
    gated_gemv = staticmethod(gemvs.gated_gemv)
    round_rows = staticmethod(round_rows)
    multiply_scaled = staticmethod(multiply_scaled)
    multiply_together = staticmethod(multiply_together)
    scaled_gated_gemv = staticmethod(scaled_gemvs.scaled_gated_gemv)
    rotate = staticmethod(rotation.rotate)
    rotate_heads = staticmethod(rotated_norm.rotate_heads)
    normalise_latents = staticmethod(rotated_norm.normalise_latents)
    rotary_angles = staticmethod(fused_qkv.rotary_angles)
    normalise_rotate_store_ = staticmethod(fused_qkv.normalise_rotate_store_)
    prepare_gated_qkv_ = staticmethod(fused_qkv.prepare_gated_qkv_)
    attend_linearly = staticmethod(fused_delta_net.attend_linearly)
    advance_states = staticmethod(verified_delta_net.advance_states)
    attend_kda = staticmethod(kda_tokens.attend_kda)
    attend_kda_in_chunks = staticmethod(kda_chunks.attend_kda_in_chunks)
    attend_in_chunks = staticmethod(chunked_delta_net.attend_in_chunks)
    scan_tokens = staticmethod(tokens.scan_tokens)
    scan_in_chunks = staticmethod(chunks.scan_in_chunks)
    store_pooled_keys = staticmethod(store_pooled_keys)
    join_streams = staticmethod(streams.join_streams)
    join_and_split = staticmethod(streams.join_and_split)
    join_into_one = staticmethod(streams.join_into_one)
    choose_experts = staticmethod(expert_choice.choose_experts)
    choose_beside_shared = staticmethod(shared_expert.choose_beside_shared)
    run_experts = staticmethod(experts.run_experts)
    run_routed_experts = staticmethod(experts.run_routed_experts)
    rows_added_in_product = 512
    """Fewest rows for which a matrix product adds the residual itself. A product of this many rows
    hides the reading of the residual. Adding it in the norm would double the norm's time, 1% of a
    long prefill."""


KERNELS: Final = FusedKernels()

"""The fused kernels of CUDA devices; `layers/fused_kernels.py` hands them out."""

from __future__ import annotations

from typing import Final

from sglang.srt.layers.fused_kernels import FusedKernels
from sglang.srt.layers.triton_ops import (
    expert_choice,
    fused_delta_net,
    fused_experts,
    fused_qkv,
    gating,
    gemv,
    norm,
    vocab,
)

_ROWS_ADDED_IN_PRODUCT: Final = 512
"""A product of this many rows hides the reading of the residual. Adding it in the norm would double
the norm's time, 1% of a long prefill."""

KERNELS: Final = FusedKernels(
    silu_and_mul=gating.silu_and_mul,
    rms_norm=norm.rms_norm,
    add_rms_norm_=norm.add_rms_norm_,
    add_parts_rms_norm_=norm.add_parts_rms_norm_,
    look_up_share=vocab.look_up_share,
    argmax_of_ranks=vocab.argmax_of_ranks,
    plan_gemv=gemv.plan,
    gemv=gemv.gemv,
    gated_gemv=gemv.gated_gemv,
    rotary_angles=fused_qkv.rotary_angles,
    normalise_rotate_store_=fused_qkv.normalise_rotate_store_,
    prepare_gated_qkv_=fused_qkv.prepare_gated_qkv_,
    scale_by_gates_=gating.scale_by_gates_,
    attend_linearly=fused_delta_net.attend_linearly,
    choose_experts=expert_choice.choose_experts,
    run_experts=fused_experts.run_experts,
    rows_added_in_product=_ROWS_ADDED_IN_PRODUCT,
    has_grouped_mm=True,
    runs_fla=True,
)

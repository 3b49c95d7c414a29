"""Fused kernels by kind of device: one launch instead of several of torch's.

On devices without fused kernels, layers use torch's operations.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from sglang.srt.distributed.tensor_group import PeerParts, TensorGroup
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.layers.placement import Share

GemvConfig: TypeAlias = tuple[int, int, int]

MOST_TAPS: Final = 4
"""The widest convolution that `attend_linearly` takes, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayout:
    """Columns of a delta-net layer's projections, which lie side by side.

    Key head `h` begins at `q + h * qk_step` and `k + h * qk_step`. Its value head `n`, below
    `repeats`, begins at `v + h * v_step + n * value_dim`, likewise from `z` (the gate), and at
    `b + h * ba_step + n`, likewise from `a`.
    """

    q: int
    k: int
    v: int
    z: int
    b: int
    a: int
    qk_step: int
    v_step: int
    ba_step: int
    key_heads: int
    repeats: int
    """Value heads per key head."""
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution, in tokens: at most `MOST_TAPS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStates:
    """The states of one delta-net layer, and a step's slots in them: int64 on the device."""

    temporal: torch.Tensor
    """`[slots, num_heads, key_dim, value_dim]`."""
    conv: torch.Tensor
    """`[slots, channels, kernel - 1]`."""
    slots: torch.Tensor
    """`[bs]`: slots that the step writes."""
    read_slots: torch.Tensor
    """`[bs]`: slots that the requests continue from."""
    bounds: torch.Tensor | None = None
    """`[bs + 1]`: begin and end of each request's tokens; None: one token each."""
    track_slots: torch.Tensor | None = None
    """`[bs]`: slots for snapshots after `track_lens` tokens; None: no snapshots."""
    track_lens: torch.Tensor | None = None
    """`[bs]`: new tokens before each snapshot; 0: no snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """The rule that chooses a token's experts; see `RouterOptions`."""

    top_k: int
    is_softmax: bool
    renormalize: bool
    factor: float
    """Multiplies the weights of the chosen experts."""
    groups: int
    top_groups: int
    """Groups that a token may use."""
    two_of_group: bool
    """If true, a group's score is the sum of its two best experts' scores, else the best score."""
    correction_bias: torch.Tensor | None
    """fp32 `[num_experts]`."""
    has_shared: bool
    """True if there is an expert that every token uses."""
    shared_gate: torch.Tensor | None
    """`[1, hidden_size]`: projection whose sigmoid is the shared expert's weight; None: it is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Weights of a layer's experts."""

    gate_up: torch.Tensor
    """`[num_experts, 2 * features, hidden_size]`."""
    down: torch.Tensor
    """`[num_experts, hidden_size, features]`."""
    shared: tuple[torch.Tensor, torch.Tensor] | None
    """`gate_up` and `down` of the shared expert, without the first dimension; as many features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Functions on tensors of the device. Their modules have the contracts."""

    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    add_rms_norm_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], None]
    add_parts_rms_norm_: Callable[
        [PeerParts, torch.Tensor, torch.Tensor, float, bool], torch.Tensor
    ]
    look_up_share: Callable[[torch.Tensor, torch.Tensor, Share], torch.Tensor]
    argmax_of_ranks: Callable[[torch.Tensor, Share, TensorGroup], torch.Tensor | None]
    plan_gemv: Callable[[int, int], GemvConfig | None]
    gemv: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, GemvConfig], None
    ]
    """One row times a matrix."""
    gated_gemv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, GemvConfig], None]
    """One row times the matrices of gate and up, with the activation."""
    rotary_angles: Callable[
        [torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]
    ]
    normalise_rotate_store_: Callable[
        [
            torch.Tensor,
            tuple[torch.Tensor, float] | None,
            tuple[torch.Tensor, torch.Tensor],
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
        ],
        None,
    ]
    prepare_gated_qkv_: Callable[
        [
            torch.Tensor,
            tuple[torch.Tensor, torch.Tensor],
            float,
            tuple[torch.Tensor, torch.Tensor],
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
        ],
        torch.Tensor,
    ]
    scale_by_gates_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
    attend_linearly: Callable[
        [
            torch.Tensor,
            DeltaLayout,
            tuple[torch.Tensor, torch.Tensor, torch.Tensor],
            tuple[torch.Tensor, float],
            DeltaStates,
        ],
        torch.Tensor,
    ]
    choose_experts: Callable[
        [torch.Tensor, ExpertChoice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
    ]
    run_experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights], torch.Tensor]
    """For few tokens, for which most of the time goes into reading their experts' weights."""
    rows_added_in_product: int
    """Fewest rows for which a matrix product adds the residual itself."""
    has_grouped_mm: bool
    """True if `torch._grouped_mm` takes bf16 on the device without reading back to the CPU."""
    runs_fla: bool
    """True if flash-linear-attention, where installed, has kernels for the device."""


_MODULES: Final[dict[str, str | None]] = {
    "cpu": None,
    "cuda": "sglang.srt.layers.triton_ops.fused",
    "npu": None,
}
"""Module with the `KERNELS` of each kind of device; None: no fused kernels."""


# Cached in C, because layers that are made without a device ask in each step.
@functools.cache
def fused_kernels(device: torch.device | str) -> FusedKernels | None:
    """Fused kernels of `device`; None: it has none.

    Raises:
        ValueError: The kind of device is not known.
    """
    module = _MODULES[device_kind(str(device)).name]
    if module is None:
        return None
    kernels = importlib.import_module(module).KERNELS
    assert isinstance(kernels, FusedKernels)
    return kernels

"""Arguments of fused kernels, as plain data. Needs no triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

LEAST_PACKED: Final = 32
_MOST_PACKED: Final = 128
"""Bounds of a block of 4-bit elements, in inputs."""
FP4_BIAS: Final = 32
"""Kernels compute with 4-bit floats times 2^-FP4_BIAS, so that factors of them are in bf16's range:
products of theirs with scales from 2^-93 to `MOST_FP4_SCALE` are exact."""
MOST_FP4_SCALE: Final = 160
"""The greatest scale of 4-bit floats that kernels take: 2^33 as e8m0."""
MOST_TAPS: Final = 4
"""The widest convolution that `attend_linearly` takes, in tokens."""
_MAGNITUDE_BITS: Final = (6, 3, 0, 9)
_SIGN_BITS: Final = (15, 12, 14, 13)
"""Lowest bit of the magnitude, and the bit of the sign, of each of four floats in half a word."""
TILE_DIMS: Final = frozenset({64, 128})
"""Values of `key_dim` and `value_dim` that `attend_in_chunks` takes: its tiles are whole heads."""

_SCAN_DIMS: Final = frozenset({16, 32, 64, 128, 256})
"""Values of `head_dim` and `state_size` that `scan_in_chunks` takes: its tiles divide them."""


class AngleKinds(NamedTuple):
    """Kinds of rotary angles of the same positions."""

    frequencies: torch.Tensor
    """fp32 `[kinds, rotary_dim / 2]`: radians per position."""
    scales: torch.Tensor
    """fp32 `[kinds]`: factor of cosines and sines."""
    multiples: torch.Tensor
    """int64 `[kinds]`: positions are rounded down to multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayout:
    """Columns of a delta-net layer's projections, which lie side by side.

    Key head `h` begins at columns `q + h * qk_step` and `k + h * qk_step`. It has `repeats` value
    heads. Value head `n` begins at `v + h * v_step + n * value_dim`, and its gate likewise from
    `z`. Its scalars are at `b + h * ba_step + n`, and likewise from `a`.
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


class KdaProjected(NamedTuple):
    """Projections of the input of a layer of Kimi Delta Attention (KDA)."""

    columns: torch.Tensor
    """`[num_tokens, columns]` with dense rows: queries, keys, values and strengths, where a
    `DeltaLayout` has them."""
    decay: torch.Tensor
    """`[num_tokens, num_heads * key_dim]`: time steps of key channels, before bias and softplus."""
    gate: torch.Tensor
    """`[num_tokens, num_heads * value_dim]`: gates of the output, before the sigmoid."""


class DeltaInputs(NamedTuple):
    """Inputs of a delta-net layer's states, by token. A verification keeps them until it is known
    which tokens are accepted. Dense; `kept` is the dtype of conv states."""

    conv: torch.Tensor
    """`kept` `[num_tokens, channels]`: inputs of the convolution."""
    k: torch.Tensor
    """`kept` `[num_tokens, key_heads, key_dim]`: keys after the convolution, not yet normalised."""
    v: torch.Tensor
    """`kept` `[num_tokens, num_heads, value_dim]`: values after the convolution."""
    g: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: log of the decay."""
    beta: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: strength of the correction."""


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
    """`[bs + 1]`: begin and end of each request's tokens; None: all have the same number."""
    kept: DeltaInputs | None = None
    """Verification only, without `bounds`: where it leaves its tokens' inputs, in place of states.
    The tensors may be longer."""
    track_slots: torch.Tensor | None = None
    """`[bs]`: slots for snapshots after `track_lens` tokens; None: all are 0."""
    track_lens: torch.Tensor | None = None
    """`[bs]`: new tokens before each snapshot; 0: no snapshot."""

    @property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """`read_slots`, `slots`, `track_slots`, `bounds`, `track_lens`, as kernels take them.
        `slots` stands in for what is None, which they do not read."""
        own = self.read_slots, self.slots, self.track_slots, self.bounds, self.track_lens
        return tuple(self.slots if one is None else one for one in own)


class DeltaChunks(NamedTuple):
    """Chunks of a prefill for `attend_in_chunks`: int64 tensors on the device.

    A request's chunks begin at its first new token, and anew after its snapshot.
    """

    size: int
    """Most tokens of a chunk."""
    requests: torch.Tensor
    """`[num_chunks]`: the request of each chunk, ascending."""
    first_chunks: torch.Tensor
    """`[bs + 1]`: index of each request's first chunk; last, the number of chunks. The step may
    have further chunks, without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceLayout:
    """Sizes of a Mamba-2 layer. Its projections lie side by side: the gates of all heads, then the
    channels of the convolution (x of all heads, B of all groups, C of all groups), then the time
    steps of all heads."""

    heads: int
    groups: int
    """Groups of consecutive heads."""
    head_dim: int
    state_size: int
    kernel: int
    """Width of the convolution, in tokens."""

    @property
    def values(self) -> int:
        """Features of all heads; the column at which the channels begin."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.values + 2 * self.groups * self.state_size

    @property
    def takes_chunks(self) -> bool:
        """True if `scan_in_chunks` takes heads and states of these sizes."""
        return self.head_dim in _SCAN_DIMS and self.state_size in _SCAN_DIMS


class StateSpaceWeights(NamedTuple):
    """Weights of a Mamba-2 layer besides its projections; fp32 but for the norm's."""

    conv: torch.Tensor
    """`[channels, kernel]`."""
    conv_bias: torch.Tensor
    """`[channels]`."""
    a_log: torch.Tensor
    """`[heads]`: log of the decay rate."""
    dt_bias: torch.Tensor
    """`[heads]`: bias of the time step."""
    skip: torch.Tensor
    """`[heads]`: factor with which x is added to the output."""
    norm: torch.Tensor
    """`[values]`: weight of the gated norm of groups, in the dtype of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """The rule that chooses a token's experts; see `RouterOptions`."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"]
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
    table: torch.Tensor | None = None
    """int64 `[vocabulary, top_k]`: experts by token; None: scores choose."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledWeight:
    """Weights whose elements have scales: an element stands for `(element - zero) * scale`."""

    elements: torch.Tensor
    """float8_e4m3fn `[..., outputs, inputs]`; or uint8 `[..., outputs, inputs / 2]`: two elements
    of 4 bits a byte, integers in the order of `inputs_of_bytes`, floats in that of `fp4_words`.
    Contiguous."""
    scales: torch.Tensor
    """`[..., outputs / height, inputs / group]`, contiguous: fp32 for fp8; bf16 or fp16 for 4-bit
    integers; uint8 for 4-bit floats (e2m1), of which a scale s stands for 2^(s - 127) (e8m0)."""
    zeros: torch.Tensor | None = None
    """uint8 `[..., outputs, inputs / group]`: zero points of 4-bit integers; None: they are 8."""

    @property
    def is_fp8(self) -> bool:
        return self.elements.dtype == torch.float8_e4m3fn

    @property
    def is_fp4(self) -> bool:
        """True if the elements are 4-bit floats."""
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights, `[..., outputs, inputs]`."""
        *lead, inputs = self.elements.shape
        return *lead, inputs if self.is_fp8 else 2 * inputs

    @property
    def height(self) -> int:
        """Outputs that share a scale."""
        return self.shape[-2] // self.scales.shape[-2]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def block(self) -> int:
        """Inputs whose 4-bit elements are packed together."""
        return packed_block(self.group)


def takes_rounded(weight: Weight | None, tokens: int) -> ScaledWeight | None:
    """`weight` if its product with so many tokens takes `RoundedRows`."""
    if isinstance(weight, ScaledWeight) and weight.is_fp8 and tokens > 1:
        return weight
    return None


def packed_block(group: int) -> int:
    """Inputs whose 4-bit elements are packed together, in groups of so many."""
    return math.gcd(group, _MOST_PACKED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedRows:
    """Activations in fp8 for products with one fp8 weight, made by the kernel that computed them.
    Its length is the number of tokens."""

    elements: torch.Tensor
    """float8_e4m3fn `[rows, features]`, contiguous. Rows after the tokens are zeros, which some
    products need."""
    scales: torch.Tensor
    """fp32 `[rows, features / group]`; columns are contiguous."""
    num_tokens: int
    dtype: torch.dtype
    """Dtype of the activations."""

    def __len__(self) -> int:
        return self.num_tokens


def inputs_of_bytes(block: int) -> torch.Tensor:
    """The input in the low bits of each byte of a block, int64 `[block / 2]`; that in the high bits
    is `block / 2` after it. Four lanes of a warp each read a quarter of the bytes at once, which
    are then their parts of the left operand of a tensor core's product, without exchanging any.

    Args:
        block: Inputs of the block, a multiple of `LEAST_PACKED`.

    Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16".
    """
    inputs = torch.arange(block // 2).view(-1, 2, 4, 2)
    return inputs.permute(2, 0, 1, 3).flatten()


def fp4_words(floats: torch.Tensor) -> torch.Tensor:
    """Pack eight 4-bit floats in a word, in the order of bits that kernels unpack; see
    `triton_ops.scaled.fp4`.

    A block of 32 inputs has four words. Each of four lanes of a warp reads one word: its part of
    the left operand of a tensor core's product. The k-th input in the low half of a lane's word is
    number `8 * k + 2 * lane` of the block. The high half has the inputs after these.

    Args:
        floats: Bits of e2m1, uint8 `[..., inputs]`; inputs are a multiple of `LEAST_PACKED`.

    Returns:
        uint8 `[..., inputs / 2]`.

    Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16".
    """
    parts = floats.reshape(*floats.shape[:-1], -1, 4, 4, 2).int()
    halves = torch.tensor((0, 16), dtype=torch.int32, device=floats.device)
    magnitudes, signs = (
        torch.tensor(bits, dtype=torch.int32, device=floats.device).view(4, 1, 1) + halves
        for bits in (_MAGNITUDE_BITS, _SIGN_BITS)
    )
    bits = (parts & 7) << magnitudes | (parts >> 3) << signs
    # No bit is in two of them, so the sum has them all.
    words = bits.sum((-3, -1), dtype=torch.int32)
    return words.view(torch.uint8).flatten(-2)


Weight: TypeAlias = torch.Tensor | ScaledWeight
"""A weight as a layer has it: plain, or with scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """An activation of gate and up: `(up + shift) * gate * sigmoid(alpha * gate)`, of a gate of at
    most `limit` and an up within `[-limit, limit]`."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0


ExpertActivation: TypeAlias = Literal["silu", "squared_relu"] | ClampedGate
"""Computation between the projections of an expert: `silu(gate) * up`, `max(up, 0)^2` of experts
without a gate, or a clamped gate."""


class ExpertBiases(NamedTuple):
    """Biases of a layer's experts, in the dtype of activations."""

    gate_up: torch.Tensor
    """`[num_experts, 2 * features]`."""
    down: torch.Tensor | None
    """`[num_experts, hidden_size]`; None: another rank adds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Weights of a layer's experts."""

    gate_up: Weight
    """`[num_experts, 2 * features, hidden_size]`."""
    down: Weight
    """`[num_experts, hidden_size, features]`, plain if `gate_up` is."""
    shared: tuple[Weight, Weight] | None
    """`gate_up` and `down` of the shared expert, without the first dimension; as many features.
    They may be of another kind than the others' weights."""
    activation: ExpertActivation = "silu"
    """Of all experts; with a gate."""
    biases: ExpertBiases | None = None
    """None: the experts have none. A shared expert has none."""


class PooledKeyWeights(NamedTuple):
    """Weights of the rule: of the layer norm of keys, `[dim]` each; and what a token's place in its
    group adds to its gates, fp32 `[ratio, dim]`."""

    norm: torch.Tensor
    norm_bias: torch.Tensor
    eps: float
    position: torch.Tensor


class OpenedGroups(NamedTuple):
    """The tokens of open groups, and where requests find theirs."""

    tokens: torch.Tensor
    """`[rows, ratio - 1, 2 * dim]`, contiguous: normalised keys and gates by place."""
    rows: torch.Tensor
    """int64 `[bs]`: row of each request."""


class StreamsJoin(NamedTuple):
    """A block's output, which is not yet in the streams."""

    out: torch.Tensor
    """Contiguous `[num_tokens, hidden_size]`."""
    rest: torch.Tensor | None
    """As `out`, added to it; None: nothing is."""
    weights: torch.Tensor
    """fp32 `[num_tokens, streams + streams^2]`: of the output in each stream; of each stream
    (rows) in each new one."""


class StreamsSplit(NamedTuple):
    """How the next block, or the output head, reads the streams."""

    fn: torch.Tensor
    """fp32 `[outputs, streams * hidden_size]`, contiguous: the projection of all weights."""
    base: torch.Tensor
    """fp32 `[outputs]`."""
    scale: torch.Tensor
    """fp32 `[3]`: of the input's, the output's and the mixing weights; of a head `[1]`."""
    iterations: int
    eps: float
    norm_eps: float
    """Epsilon of the norm of a token's streams."""
    norm: torch.Tensor
    """`[hidden_size]`: weight of the norm of the block's input."""
    input_eps: float
    """Epsilon of this norm."""
    is_wide: bool
    """True if this norm is rounded once, after its weight."""


class EnteredBlock(NamedTuple):
    """What `join_and_split` gives a block."""

    streams: torch.Tensor
    """`[num_tokens, streams, hidden_size]`."""
    x: torch.Tensor
    """`[num_tokens, hidden_size]`: the block's normalised input."""
    zeros: torch.Tensor
    """As `x`: a residual for the block, of zeros."""
    weights: torch.Tensor
    """See `StreamsJoin`."""

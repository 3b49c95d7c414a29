"""Recurrent states under verification of drafts.

It is known only after a verification how many of its tokens are accepted, and a state must not have
seen the others. A verification therefore leaves all states as they are, and keeps the inputs of its
tokens. A commit replays the accepted ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear_attention.causal_conv import conv_states_after
from sglang.srt.layers.linear_attention.gated_delta_rule import DeltaRuleInputs, TorchDeltaRule
from sglang.srt.layers.triton_ops.arguments import DeltaInputs
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec


@dataclass(frozen=True, slots=True)
class VerifyBuffers:
    """Inputs of one verification's tokens in all delta-net layers, for `commit_verified`."""

    inputs: DeltaInputs
    """Each `[layers, max_batch_size * num_draft_tokens, ...]`, request by request."""
    num_draft_tokens: int
    """Tokens of each request: the last one and its drafts."""

    @classmethod
    def of(
        cls,
        spec: MambaSpec,
        *,
        max_batch_size: int,
        num_draft_tokens: int,
        device: torch.device | str,
    ) -> Self:
        """Buffers for verifications of at most `max_batch_size` requests.

        Args:
            spec: Spec of the states; activations have the dtype of its conv states.
            device: The states' device; `"meta"` for `num_bytes` alone.

        Raises:
            ValueError: A size is less than 1, or the convolution has other channels than queries,
                keys and values of the states' heads.
        """
        if min(max_batch_size, num_draft_tokens) < 1:
            raise ValueError(
                f"a verification needs at least 1 request and 1 token of each, not "
                f"max_batch_size={max_batch_size} and num_draft_tokens={num_draft_tokens}"
            )
        temporal, conv = spec.buffers
        heads, key_dim, value_dim = temporal.shape
        channels = conv.shape[0]
        key_heads, rest = divmod(channels - heads * value_dim, 2 * key_dim)
        if rest or key_heads < 1 or heads % key_heads:
            raise ValueError(
                f"conv states of {channels} channels do not fit temporal states of {heads} heads "
                f"with keys of {key_dim} and values of {value_dim}: the channels must be all "
                "queries, all keys and all values"
            )
        count = len(spec.layers), max_batch_size * num_draft_tokens

        def empty(*shape: int, dtype: torch.dtype = conv.dtype) -> torch.Tensor:
            return torch.empty((*count, *shape), dtype=dtype, device=device)

        inputs = DeltaInputs(
            conv=empty(channels),
            k=empty(key_heads, key_dim),
            v=empty(heads, value_dim),
            g=empty(heads, dtype=torch.float32),
            beta=empty(heads, dtype=torch.float32),
        )
        return cls(inputs, num_draft_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def of_layer(self, place: int, num_tokens: int, num_requests: int) -> DeltaInputs:
        """Buffers for one layer's inputs, each `[max_batch_size * num_draft_tokens, ...]`.

        Args:
            place: Index of the layer in the layers of the states' spec.
            num_tokens: Tokens of the verification.
            num_requests: Its requests.
        """
        assert num_tokens == num_requests * self.num_draft_tokens, "each has the same number"
        assert num_tokens <= self.inputs.conv.shape[1], "larger than the largest batch"
        return DeltaInputs(*(tensor[place] for tensor in self.inputs))


def commit_verified(
    buffers: VerifyBuffers,
    pool: MambaPool,
    slots: torch.Tensor,
    counts: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Write to `targets[i]` the states of `slots[i]`, moved on by the first `counts[i]` tokens of
    request `i` of the last verification, in every delta-net layer.

    States are rounded to their dtype after each token, like in decode steps. The work is queued on
    the current stream and never waits for the device, so a graph can capture it.

    Args:
        buffers: Inputs that the verification kept.
        pool: The pool of the states that the verification read. `slots` must not have been written
            since then.
        slots: int64 `[bs]` on the device: slots of the running states.
        counts: int64 `[bs]` on the device, 0 to `num_draft_tokens`; 0: a copy.
        targets: int64 `[bs]` on the device: slots of snapshots, or `slots[i]` itself. No other
            target occurs twice or in `slots`, except 0 (padding), whose contents are undefined.
    """
    kernels = fused_kernels(pool.device)
    if kernels is not None:
        kernels.advance_states(
            buffers.inputs,
            buffers.num_draft_tokens,
            (pool.temporal, pool.conv),
            (slots, counts, targets),
        )
        return
    for place in range(pool.layer_num):
        _commit_layer(
            buffers, place, (pool.temporal[place], pool.conv[place]), slots, counts, targets
        )


def _commit_layer(
    buffers: VerifyBuffers,
    place: int,
    states: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    counts: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Commit one layer's states, `temporal` and `conv`, with torch's operations."""
    temporal, conv = states
    each, bs = buffers.num_draft_tokens, len(slots)
    inputs, k, v, g, beta = (
        tensor[place, : bs * each].view(bs, each, *tensor.shape[2:]) for tensor in buffers.inputs
    )
    state, rule = temporal.index_select(0, slots).float(), TorchDeltaRule()
    for token in range(each):
        is_rejected = (counts <= token).view(bs, 1)
        # Inputs of zero change no state.
        keys, values = (part[:, token].masked_fill(is_rejected.unsqueeze(-1), 0) for part in (k, v))
        decay, strength = (part[:, token].masked_fill(is_rejected, 0) for part in (g, beta))
        # The keys stand in for queries, because the output is not used.
        rule.advance(DeltaRuleInputs(keys, keys, values, decay, strength), state)
        state = state.to(temporal.dtype).float()
    conv_after = conv_states_after(inputs, conv.index_select(0, slots), counts)
    # Padding rows all write to the padding slot, in any order.
    temporal.index_copy_(0, targets, state.to(temporal.dtype))
    conv.index_copy_(0, targets, conv_after)

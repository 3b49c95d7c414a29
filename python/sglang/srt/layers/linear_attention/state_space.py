"""The rule of Mamba-2: attention through a state of fixed size that decays.

For one head, with state S `[head_dim, state_size]`, time step dt > 0 and decay a = exp(g):

    S_t = a_t S_(t-1) + dt_t x_t B_t^T
    y_t = S_t C_t

Heads have inputs x of their own; consecutive heads share B and C, as a group.

Source: T. Dao, A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality" (ICML 2024), for the rule and its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan


class StateSpaceInputs(NamedTuple):
    """Inputs of the rule for each token. `num_heads` is a multiple of `num_groups`."""

    x: torch.Tensor
    """`[num_tokens, num_heads, head_dim]`, of any float dtype."""
    b: torch.Tensor
    """`[num_tokens, num_groups, state_size]`, likewise."""
    c: torch.Tensor
    """Like `b`."""
    dt: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: the time step, at least 0."""
    g: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: log of the decay, at most 0."""

    def of_heads(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 `b` or `c`, repeated for each head of a group: `[num_tokens, num_heads, ...]`."""
        return values.float().repeat_interleave(self.x.shape[1] // self.b.shape[1], dim=1)

    def scaled(self) -> torch.Tensor:
        """fp32 `dt` times `x`."""
        return self.x.float() * self.dt.unsqueeze(-1)


class _Chunks(NamedTuple):
    """Chunk tensors that do not depend on states, each `[num_chunks, num_heads, ...]`."""

    own: torch.Tensor
    """`[chunk, head_dim]`: outputs if the state is zero."""
    reads: torch.Tensor
    """`[chunk, state_size]`: C with the decay since the chunk's beginning."""
    change: torch.Tensor
    """`[head_dim, state_size]`: what the chunk adds to the state."""
    decay: torch.Tensor
    """`[1, 1]`: decay of the state over the whole chunk."""


class TorchStateSpace:
    """The rule in torch's operations, for any device, computed in fp32."""

    def decode(self, inputs: StateSpaceInputs, state: torch.Tensor) -> torch.Tensor:
        """Compute one token of each request.

        Args:
            state: fp32 `[bs, num_heads, head_dim, state_size]`, overwritten with the state after
                the token.

        Returns:
            fp32 `[bs, num_heads, head_dim]`.
        """
        b, c = inputs.of_heads(inputs.b), inputs.of_heads(inputs.c)
        state.mul_(inputs.g.exp()[..., None, None])
        state.addcmul_(inputs.scaled().unsqueeze(-1), b.unsqueeze(-2))
        return torch.einsum("bhpn,bhn->bhp", state, c)

    def extend(
        self,
        inputs: StateSpaceInputs,
        state: torch.Tensor,
        plan: ExtendPlan,
        state_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the new tokens of each request.

        Tokens after a snapshot continue from it as stored, rounded to `state_dtype`.

        Args:
            state: fp32 `[bs, num_heads, head_dim, state_size]`: states before the prefill.
            plan: The batch's plan.
            state_dtype: Dtype in which states are stored.

        Returns:
            fp32 `[num_tokens, num_heads, head_dim]`; the states after the prefill, as `state`; and
            the snapshots, fp32 `[num_tracked, ...]`, in the plan's order.
        """
        chunks = _in_chunks(inputs, plan)
        out = chunks.own

        def step(places: slice, current: torch.Tensor) -> None:
            now = _Chunks(*(tensor[places] for tensor in chunks))
            out[places] += now.reads @ current.transpose(-1, -2)
            current.mul_(now.decay).add_(now.change)

        after, snapshots = plan.advance(state, state_dtype, step)
        return plan.by_token(out), after, snapshots


def _in_chunks(inputs: StateSpaceInputs, plan: ExtendPlan) -> _Chunks:
    """Compute all chunks at once, as far as they do not depend on states."""
    x, g = plan.in_chunks(inputs.scaled()), plan.in_chunks(inputs.g)
    b, c = plan.in_chunks(inputs.of_heads(inputs.b)), plan.in_chunks(inputs.of_heads(inputs.c))
    total = g.cumsum(dim=-1)
    is_past = torch.ones(
        total.shape[-1], total.shape[-1], dtype=torch.bool, device=g.device
    ).tril_()
    # Masked before exp, because decay over a negative time may overflow.
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    between = between.masked_fill_(~is_past, float("-inf")).exp_()
    remaining = (total[..., -1:] - total).exp_().unsqueeze(-1)
    return _Chunks(
        (c @ b.transpose(-1, -2)).mul_(between) @ x,
        c * total.exp().unsqueeze(-1),
        (x * remaining).transpose(-1, -2) @ b,
        total[..., -1].exp()[..., None, None],
    )

"""The gated delta rule: attention through a state of fixed size that decays and is corrected.

For one head, with state S `[key_dim, value_dim]` and decay a = exp(g):

    S_t = a_t S_(t-1) + k_t d_t^T       where d_t = b_t (v_t - (a_t S_(t-1))^T k_t)
    o_t = S_t^T q_t

Sources: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
Rule" (ICLR 2025) for the rule and its chunks; S. Yang et al., "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length" (NeurIPS 2024) for the triangular system. Here queries and
keys are normalised, and queries are scaled by key_dim^-0.5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.srt.layers.linear_attention.extend_plan import CHUNK, ExtendPlan

_NORM_EPS = 1e-6


class DeltaRuleInputs(NamedTuple):
    """Inputs of the rule for each token. `num_heads` is a multiple of `num_key_heads`."""

    q: torch.Tensor
    """`[num_tokens, num_key_heads, key_dim]`, of any float dtype."""
    k: torch.Tensor
    """Like `q`."""
    v: torch.Tensor
    """`[num_tokens, num_heads, value_dim]`."""
    g: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: log of the decay, at most 0. `KimiDeltaRule`: of each key
    channel, `[num_tokens, num_heads, key_dim]`."""
    beta: torch.Tensor
    """fp32 `[num_tokens, num_heads]`: strength of the correction, 0 to 1."""

    def normalised(self) -> DeltaRuleInputs:
        """The inputs in fp32: unit keys and scaled queries, both repeated for each value head."""
        repeats = self.v.shape[1] // self.k.shape[1]
        q = _unit(self.q.float()) * self.q.shape[-1] ** -0.5
        k = _unit(self.k.float())
        return DeltaRuleInputs(
            q.repeat_interleave(repeats, dim=1),
            k.repeat_interleave(repeats, dim=1),
            self.v.float(),
            self.g,
            self.beta,
        )


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


class Chunks(NamedTuple):
    """Chunk tensors that do not depend on states, each `[num_chunks, num_heads, ...]`."""

    values: torch.Tensor
    """`[CHUNK, value_dim]`: the corrections if the state is zero."""
    reads: torch.Tensor
    """`[CHUNK, key_dim]`: subtract the product of this and the state from `values`."""
    scores: torch.Tensor
    """`[CHUNK, CHUNK]`: scores of the chunk's queries for its own keys."""
    queries: torch.Tensor
    """`[CHUNK, key_dim]`: queries with the decay since the chunk's beginning."""
    keys: torch.Tensor
    """`[CHUNK, key_dim]`: keys with the decay until the chunk's end."""
    decay: torch.Tensor
    """`[1, 1]`, or `[key_dim, 1]`: decay of the state over the whole chunk."""


class TorchDeltaRule:
    """The rule in torch's operations, for any device, computed in fp32."""

    def decode(
        self, inputs: DeltaRuleInputs, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one token of each request.

        Args:
            state: fp32 `[bs, num_heads, key_dim, value_dim]`, overwritten.

        Returns:
            fp32 `[bs, num_heads, value_dim]`, and the state after the token.
        """
        inputs = inputs.normalised()
        self._advance(inputs, state)
        return torch.einsum("bhkv,bhk->bhv", state, inputs.q), state

    def advance(self, inputs: DeltaRuleInputs, state: torch.Tensor) -> None:
        """Like `decode`, without an output; `inputs.q` may be anything of its shape."""
        self._advance(inputs.normalised(), state)

    def _advance(self, inputs: DeltaRuleInputs, state: torch.Tensor) -> None:
        _, k, v, g, beta = inputs
        state.mul_(self._decay(g))
        known = torch.einsum("bhkv,bhk->bhv", state, k)
        correction = (v - known) * beta.unsqueeze(-1)
        state.addcmul_(k.unsqueeze(-1), correction.unsqueeze(-2))

    def _decay(self, g: torch.Tensor) -> torch.Tensor:
        """Factor of the states `[bs, num_heads, key_dim, value_dim]`."""
        return g.exp()[..., None, None]

    def extend(
        self,
        inputs: DeltaRuleInputs,
        state: torch.Tensor,
        plan: ExtendPlan,
        state_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the new tokens of each request.

        Tokens after a snapshot continue from it as stored, rounded to `state_dtype`.

        Args:
            state: fp32 `[bs, num_heads, key_dim, value_dim]`: states before the prefill.
            plan: The batch's plan.
            state_dtype: Dtype in which states are stored.

        Returns:
            fp32 `[num_tokens, num_heads, value_dim]`; the states after the prefill, as `state`;
            and the snapshots, fp32 `[num_tracked, ...]`, in the plan's order.
        """
        inputs = inputs.normalised()
        chunks = self._solve(*(plan.in_chunks(tensor) for tensor in inputs))
        out = torch.empty_like(chunks.values)

        def step(places: slice, current: torch.Tensor) -> None:
            now = Chunks(*(tensor[places] for tensor in chunks))
            corrections = now.values - now.reads @ current
            out[places] = now.queries @ current + now.scores @ corrections
            current.mul_(now.decay).add_(now.keys.transpose(-1, -2) @ corrections)

        after, snapshots = plan.advance(state, state_dtype, step)
        return plan.by_token(out), after, snapshots

    def _solve(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> Chunks:
        """Solve all chunks at once, from their inputs `[num_chunks, num_heads, CHUNK, ...]`; the
        corrections of a chunk's tokens form a linear system."""
        total = g.cumsum(dim=-1)
        is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril_()
        # Masked before exp, because decay over a negative time may overflow.
        between = total.unsqueeze(-1) - total.unsqueeze(-2)
        between = between.masked_fill_(~is_past, float("-inf")).exp_()
        # Only entries below the diagonal are read; the diagonal is taken as ones.
        system = (k @ k.transpose(-1, -2)).mul_(between)
        scores = (q @ k.transpose(-1, -2)).mul_(between)
        return solved(q, k, v, beta, total.unsqueeze(-1), system, scores)


def solved(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    total: torch.Tensor,
    system: torch.Tensor,
    scores: torch.Tensor,
) -> Chunks:
    """Chunks with solved systems, for inputs `[num_chunks, num_heads, CHUNK, ...]`.

    Args:
        total: Log of the decay since the chunk's beginning, `[..., CHUNK, 1 or key_dim]`.
        system: Products of the keys of tokens (rows) and earlier ones (columns), with the decay
            between them, `[..., CHUNK, CHUNK]`; only entries below the diagonal are read.
        scores: Likewise of queries and keys; 0 above the diagonal.
    """
    strength, since = beta.unsqueeze(-1), total.exp()
    wanted = torch.cat([v * strength, k * strength * since], dim=-1)
    both = torch.linalg.solve_triangular(system * strength, wanted, upper=False, unitriangular=True)
    values, reads = torch.split(both, [v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:, :]
    return Chunks(
        values,
        reads,
        scores,
        q * since,
        k * (last - total).exp(),
        last.exp().transpose(-1, -2),
    )

"""The gated delta rule in chunks, in plain torch: differentiable, quick on every device.

The chunks are those of Yang et al., "Gated Delta Networks" (2024). Within chunks everything is a
batched product or a triangular solve; over chunks the state follows an affine map, which is one
kernel per chunk. No kernel has to be compiled. (The backward pass of flash-linear-attention 0.6
refuses to run on Hopper GPUs with Triton 3.4 to 3.7.0.)
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK_TOKENS = 64


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [rows, length, heads, value dim] and the fp32 state after the last token.

    Computes in fp32, whatever autocast says. The state S is [rows, heads, key dim, value dim].
    Token t changes it to

        S * exp(decay[t]) + key[t] beta[t] (value[t] - key[t] S exp(decay[t]))

    and then reads query[t] S. Queries and keys are scaled to length 1, queries also by the root of
    the key dim.

    Args:
        query, key: [rows, length, heads, key dim].
        value: [rows, length, heads, value dim].
        decay, beta: [rows, length, heads]; `decay` is a logarithm, at most 0.
        state: State before the first token; None: zeros.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _chunked(query, key, value, decay, beta, state)


def _chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length, heads, key_dim = key.shape
    value_dim = value.shape[-1]
    q = _chunks(functional.normalize(query.float(), dim=-1) * key_dim**-0.5)
    k = _chunks(functional.normalize(key.float(), dim=-1))
    v = _chunks(value.float())
    b = _chunks(beta.float().unsqueeze(-1))
    total = _chunks(decay.float().unsqueeze(-1)).cumsum(2)  # [rows * heads, chunks, tokens, 1]

    # The share of token s's write that is left at token t.
    above = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=key.device).triu(1)
    left = (total - total.transpose(2, 3)).masked_fill(above, -torch.inf).exp()
    # A token writes the difference to what the earlier tokens wrote under its key.
    overlap = (b * left * (k @ k.transpose(2, 3))).tril(-1)
    written = torch.cat([b * v, b * total.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, written, upper=False, unitriangular=True)
    new, known = solved.split([value_dim, key_dim], dim=-1)

    # The state after a chunk is `keeps` @ (the one before) + `adds`.
    end = total[:, :, -1:]
    to_end = (k * (end - total).exp()).transpose(2, 3)
    identity = torch.eye(key_dim, device=key.device)
    keeps, adds = end.exp() * identity - to_end @ known, to_end @ new
    if state is None:
        last = key.new_zeros(rows * heads, key_dim, value_dim, dtype=torch.float32)
    else:
        last = state.float().flatten(0, 1)
    states = []
    for keep, add in zip(keeps.unbind(1), adds.unbind(1), strict=True):
        states.append(last)
        last = torch.baddbmm(add, keep, last)

    within = left * (q @ k.transpose(2, 3))
    output = (q * total.exp() - within @ known) @ torch.stack(states, dim=1) + within @ new
    output = output.flatten(1, 2)[:, :length].unflatten(0, (rows, heads)).transpose(1, 2)
    return output.to(query.dtype), last.view(rows, heads, *last.shape[1:])


def _chunks(part: torch.Tensor) -> torch.Tensor:
    """Cut [rows, length, heads, dim] into chunks, padded by zeros: [rows * heads, chunks, tokens,
    dim]."""
    padded = functional.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % CHUNK_TOKENS))
    return padded.transpose(1, 2).reshape(
        -1, padded.shape[1] // CHUNK_TOKENS, CHUNK_TOKENS, part.shape[-1]
    )

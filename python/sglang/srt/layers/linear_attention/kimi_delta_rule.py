"""The delta rule of Kimi Delta Attention (KDA): each channel of a key has a decay of its own.

For one head, with state S `[key_dim, value_dim]` and decays a = exp(g) `[key_dim]`:

    S_t = diag(a_t) S_(t-1) + k_t d_t^T       where d_t = b_t (v_t - (diag(a_t) S_(t-1))^T k_t)
    o_t = S_t^T q_t

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
"""

from __future__ import annotations

import torch

from sglang.srt.layers.linear_attention.extend_plan import CHUNK
from sglang.srt.layers.linear_attention.gated_delta_rule import Chunks, TorchDeltaRule, solved


class KimiDeltaRule(TorchDeltaRule):
    """See `TorchDeltaRule`; `DeltaRuleInputs.g` has the decays of key channels."""

    def _decay(self, g: torch.Tensor) -> torch.Tensor:
        return g.exp().unsqueeze(-1)

    def _solve(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> Chunks:
        total = g.cumsum(dim=-2)
        both = torch.stack([k, q], dim=-1)
        system, scores = torch.zeros(2, *beta.shape, CHUNK, device=g.device)
        # Row by row: the decays between all tokens of a chunk would take CHUNK times the memory.
        for row in range(CHUNK):
            until = row + 1
            decay = (total[..., row:until, :] - total[..., :until, :]).exp()
            found = (k[..., :until, :] * decay) @ both[..., row, :, :]
            system[..., row, :until], scores[..., row, :until] = found.unbind(dim=-1)
        return solved(q, k, v, beta, total, system, scores)

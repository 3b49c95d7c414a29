"""Attention of long runs of new tokens by cuDNN, which on Hopper outruns every other way here.

`benchmark/results/` has the table. cuDNN prepares a plan for each new shape, which takes longer
than running it; lengths are therefore padded to a few shapes where padding cannot change a
result: behind the last token of causal attention.
"""

from __future__ import annotations

import torch


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to all keys, or causally where both are the same tokens.

    Args:
        q: bf16 or fp16 `[num_tokens, num_heads, head_dim]` on a CUDA device.
        k: `[num_keys, num_kv_heads, head_dim]`; `v` likewise.

    Returns:
        Contiguous `[num_tokens, num_heads, head_dim]`, and natural logarithms of the masses,
        contiguous fp32 `[num_heads, num_tokens]`.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, causal, scale=scaling
    )
    out: torch.Tensor = found[0][0].transpose(0, 1)
    lse: torch.Tensor = found[1].reshape(q.shape[1], q.shape[0])
    return out.contiguous(), lse.contiguous()


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View `[tokens, heads, head_dim]` as `[1, heads, tokens, head_dim]`."""
    return x.transpose(0, 1).unsqueeze(0)

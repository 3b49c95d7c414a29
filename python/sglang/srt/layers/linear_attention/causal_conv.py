"""The convolution of linear attention.

It is causal in each channel; a request's state has its last inputs. It is computed in fp32 and
rounded once, after SiLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan


def convolve_decode(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one token of each request.

    Args:
        x: `[bs, channels]`.
        state: `[bs, channels, kernel - 1]`: earlier inputs, oldest first.
        weight: `[channels, kernel]`.
        bias: fp32 `[channels]`; None: there is none.

    Returns:
        SiLU of the convolution, shaped like `x`, and the state after the token, like `state`.
    """
    window = torch.cat([state, x.to(state.dtype).unsqueeze(-1)], dim=-1)
    out = (window.float() * weight.float()).sum(dim=-1)
    if bias is not None:
        out += bias
    return F.silu(out).to(x.dtype), window[..., 1:]


def convolve_extend(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    plan: ExtendPlan,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve the new tokens of each request.

    Args:
        x: `[num_tokens, channels]`, request by request.
        state: `[bs, channels, kernel - 1]`: earlier inputs, oldest first.
        weight: `[channels, kernel]`.
        plan: The batch's plan.
        bias: fp32 `[channels]`; None: there is none.

    Returns:
        SiLU of the convolution, shaped like `x`; the states after the prefill, like `state`; the
        states of snapshots, `[num_tracked, channels, kernel - 1]`, in the plan's order.
    """
    before = state.transpose(1, 2).flatten(0, 1)
    windows = torch.cat([x, before.to(x.dtype)]).index_select(0, plan.window_rows)
    taps = weight.float().unbind(dim=1)
    length = len(windows) - len(taps) + 1
    out = windows[:length].float() * taps[0]
    for nth, tap in enumerate(taps[1:], start=1):
        out.addcmul_(windows[nth : nth + length].float(), tap)
    if bias is not None:
        out += bias
    out = F.silu(out.index_select(0, plan.first_inputs)).to(x.dtype)
    return out, _states(windows, plan.last_inputs), _states(windows, plan.tracked_inputs)


def _states(windows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """States `[n, channels, kernel - 1]`: the inputs at `places`, int64 `[n, kernel - 1]`."""
    rows = windows.index_select(0, places.reshape(-1))
    return rows.view(*places.shape, windows.shape[1]).transpose(1, 2)


def conv_states_after(x: torch.Tensor, state: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """States after the first tokens of each request.

    Args:
        x: `[bs, num_tokens, channels]`: inputs of each request.
        state: `[bs, channels, kernel - 1]`: earlier inputs, oldest first.
        counts: int64 `[bs]`: tokens before the state, 0 to `num_tokens`.

    Returns:
        Like `state`.
    """
    inputs = torch.cat([state, x.to(state.dtype).transpose(1, 2)], dim=-1)
    at = counts.unsqueeze(-1) + torch.arange(state.shape[-1], device=state.device)
    return inputs.gather(-1, at.unsqueeze(1).expand_as(state))

"""The causal convolution: batches of any lengths, states before, after and in between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.linear_attention.causal_conv import convolve_decode, convolve_extend
from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

CHANNELS = 5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_definition(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`[num_tokens, channels]` of one request."""
    inputs = torch.cat([state, x.t()], dim=1)
    return F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=CHANNELS))[0].t()


@pytest.mark.parametrize("bias", [None, normal(CHANNELS)])
@pytest.mark.parametrize("kernel", [2, 4])
def test_prefills_in_a_batch_equal_each_alone(kernel: int, bias: torch.Tensor | None) -> None:
    lens, track = [1, 9, 2, 4], [1, 5, 0, 2]
    x, weight = normal(16, CHANNELS), normal(CHANNELS, kernel)
    states = normal(4, CHANNELS, kernel - 1)
    plan = ExtendPlan.of(lens, track, kernel, "cpu")
    out, after, tracked = convolve_extend(x, states, weight, plan, bias)
    begin = 0
    for request, length in enumerate(lens):
        own = x[begin : begin + length]
        torch.testing.assert_close(
            out[begin : begin + length], by_definition(own, states[request], weight, bias)
        )
        inputs = torch.cat([states[request], own.t()], dim=1)
        assert torch.equal(after[request], inputs[:, length:])
        if track[request]:
            place = plan.tracked.tolist().index(request)
            at = track[request]
            assert torch.equal(tracked[place], inputs[:, at : at + kernel - 1])
        begin += length
    assert len(tracked) == 3


@pytest.mark.parametrize("bias", [None, normal(CHANNELS)])
def test_decoding_goes_on_where_a_prefill_ended(bias: torch.Tensor | None) -> None:
    x, weight = normal(7, CHANNELS), normal(CHANNELS, 4)
    state = torch.zeros(1, CHANNELS, 3)
    want = by_definition(x, state[0], weight, bias)
    plan = ExtendPlan.of([5], None, 4, "cpu")
    out, state, _ = convolve_extend(x[:5], state, weight, plan, bias)
    torch.testing.assert_close(out, want[:5])
    for token in (5, 6):
        step, state = convolve_decode(x[token : token + 1], state, weight, bias)
        torch.testing.assert_close(step, want[token : token + 1])
    assert torch.equal(state[0], x[4:].t())


@pytest.mark.parametrize("track", [[4], [-1]])
def test_a_snapshot_beyond_the_prefill_is_refused(track: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prefills of \[3\]"):
        ExtendPlan.of([3], track, 4, "cpu")

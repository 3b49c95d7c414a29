"""The kernels of flash-linear-attention on a GPU equal the rule in torch's operations."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.srt.layers.linear_attention.gated_delta_rule import (
    DeltaRuleInputs,
    FlaDeltaRule,
    TorchDeltaRule,
    delta_rule,
)
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = [
    pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed"
    ),
]

KEY_HEADS, HEADS, DIM = 4, 8, 128


def random_inputs(num_tokens: int) -> DeltaRuleInputs:
    generator = torch.Generator("cuda").manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device="cuda")

    q, k, v = (normal(heads, DIM).bfloat16() for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    return DeltaRuleInputs(q, k, v, -normal(HEADS).abs() * 0.3, normal(HEADS).sigmoid())


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() < 0.02 * want.abs().max()


def test_prefills_with_snapshots() -> None:
    rule = delta_rule("cuda", torch.bfloat16)
    assert isinstance(rule, FlaDeltaRule)
    lens, track = [200, 1, 64, 500], [128, 0, 64, 77]
    inputs = random_inputs(sum(lens))
    state = torch.randn(4, HEADS, DIM, DIM, device="cuda")
    plan = ExtendPlan.of(lens, track, 4, "cuda")
    got = rule.extend(inputs, state, plan, torch.float32)
    want = TorchDeltaRule().extend(inputs, state, plan, torch.float32)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""A layer asks its backend for rounded attention in plain decode steps of several tokens alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention_kind import FULL_ATTENTION
from sglang.srt.layers.forward_batch_info import ForwardMode
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

WEIGHT = ScaledWeight(
    elements=torch.zeros((128, 256), dtype=torch.float8_e4m3fn), scales=torch.ones(1, 2)
)


@pytest.mark.parametrize(
    ("tokens", "weight", "other", "is_asked"),
    [
        (3, WEIGHT, {}, True),
        (1, WEIGHT, {}, False),
        (3, torch.zeros(128, 256), {}, False),
        (3, WEIGHT, {"forward_mode": ForwardMode.EXTEND}, False),
        (3, WEIGHT, {"forward_mode": ForwardMode.TARGET_VERIFY}, False),
        (3, WEIGHT, {"stores_only": True}, False),
        (3, WEIGHT, {"context_share": object()}, False),
    ],
)
def test_when_a_backend_is_asked(
    tokens: int, weight: Any, other: dict[str, Any], is_asked: bool
) -> None:
    found: Any = object()
    layer = RadixAttention(2, 128, 0.1, 1, 5)
    backend = SimpleNamespace(forward_decode_rounded=lambda *given: (found, *given))
    fields = {"forward_mode": ForwardMode.DECODE, "stores_only": False, "context_share": None}
    batch: Any = SimpleNamespace(**fields | other, attn_backends={FULL_ATTENTION: backend})
    q = torch.zeros(tokens, 2, 128)
    got: Any = layer.forward_rounded(q, weight, batch)
    assert got == ((found, q, weight, layer, batch) if is_asked else None)

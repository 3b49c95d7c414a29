"""Attention over the paged pool with sinks, against its definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=40, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

from rigs.models.attention_cases import (  # noqa: E402
    PagedContexts,
    assert_close,
    attend,
    queries,
)
from sglang.srt.layers.triton_ops.attention.decode_attention import (  # noqa: E402
    decode_attention,
    make_arrivals,
)
from sglang.srt.layers.triton_ops.attention.extend_attention import (  # noqa: E402
    extend_attention,
    plan_blocks,
)
from sglang.srt.layers.triton_ops.attention.online_softmax import add_sinks_  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24


def sinks_of(heads: int) -> torch.Tensor:
    """Some far above all scores, some far below, some between."""
    values = torch.tensor([-80.0, 90.0, 0.0, 3.0, -2.0, 1.0], device=DEVICE)
    return values.repeat(-(-heads // 6))[:heads]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("splits", "has_gates"), [((1, 1), False), ((4, 100), False), ((8, 32), True)]
)
def test_decoding_counts_a_sink_once(
    dtype: torch.dtype, splits: tuple[int, int], has_gates: bool
) -> None:
    """In one part, joined by the last program, and joined by a kernel of its own."""
    lens = [1, 130, 64, 300]
    pool = PagedContexts(lens, KV_HEADS, HEAD_DIM, page_size=16, dtype=dtype, device=DEVICE)
    q = queries(len(lens), HEADS, HEAD_DIM, dtype, DEVICE)
    sinks, arrivals = sinks_of(HEADS), make_arrivals(DEVICE)
    gates = torch.full_like(q, 100.0) if has_gates else None
    got = decode_attention(
        q,
        pool.k,
        pool.v,
        pool.table,
        pool.rows,
        torch.tensor(lens, device=DEVICE),
        HEAD_DIM**-0.5,
        arrivals,
        gates=gates,
        sinks=sinks,
        splits=splits,
    )
    want = [
        attend(q[i : i + 1], *pool.context(i, n), prefix=n - 1, sinks=sinks)
        for i, n in enumerate(lens)
    ]
    assert_close(got, torch.cat(want), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 4])
def test_new_tokens_count_a_sink_once(dtype: torch.dtype, splits: int) -> None:
    work = [(0, 1), (200, 33), (64, 64), (290, 1)]
    lens = [prefix + new for prefix, new in work]
    pool = PagedContexts(lens, KV_HEADS, HEAD_DIM, page_size=16, dtype=dtype, device=DEVICE)
    q, sinks = queries(sum(n for _, n in work), HEADS, HEAD_DIM, dtype, DEVICE), sinks_of(HEADS)
    begins = [sum(n for _, n in work[:i]) for i in range(len(work))]
    rows = pool.rows.tolist()
    segments = [(rows[i], begins[i], *one) for i, one in enumerate(work)]
    plan = plan_blocks(
        segments,
        group=HEADS // KV_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        device=DEVICE,
    )
    plan = dataclasses.replace(plan, splits=splits)
    got = torch.empty((len(q), HEADS * HEAD_DIM), dtype=dtype, device=DEVICE)
    extend_attention(q, pool.k, pool.v, pool.table, plan, HEAD_DIM**-0.5, got, sinks=sinks)
    want = [
        attend(q[b : b + n], *pool.context(i, p + n), prefix=p, sinks=sinks)
        for i, (_, b, p, n) in enumerate(segments)
    ]
    assert_close(got, torch.cat(want), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_finished_attention_gets_a_sink(dtype: torch.dtype) -> None:
    """As if the softmax had had one more logit."""
    out = queries(5, HEADS, HEAD_DIM, dtype, DEVICE).contiguous()
    lse, sinks = torch.linspace(-3, 3, HEADS * 5, device=DEVICE).view(HEADS, 5), sinks_of(HEADS)
    share = (lse.double() - torch.logaddexp(lse.double(), sinks.double().unsqueeze(1))).exp()
    want = out.double() * share.t().unsqueeze(2)
    add_sinks_(out, lse, sinks)
    assert_close(out, want.to(dtype), dtype)

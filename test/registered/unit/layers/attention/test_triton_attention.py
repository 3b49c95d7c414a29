"""Attention over the paged pool against its definition in fp32."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from rigs.models.attention_cases import (  # noqa: E402
    FP8,
    PagedContexts,
    assert_close,
    attend,
)
from rigs.models.attention_cases import queries as queries_on  # noqa: E402
from rigs.models.scaled_weights import fp8_weight  # noqa: E402
from sglang.srt.layers.attention.dense_attention import UNIT, plan_dense  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight  # noqa: E402
from sglang.srt.layers.triton_ops.attention import online_softmax  # noqa: E402
from sglang.srt.layers.triton_ops.attention.decode_attention import (  # noqa: E402
    LONG_TOKENS,
    decode_attention,
    make_arrivals,
    plan_splits,
)
from sglang.srt.layers.triton_ops.attention.extend_attention import (  # noqa: E402
    ExtendWork,
    extend_attention,
    plan_any_blocks,
    plan_blocks,
    put_blocks,
)
from sglang.srt.layers.triton_ops.attention.online_softmax import (  # noqa: E402
    combine_splits,
    merge_into_,
    split_range,
)
from sglang.srt.layers.triton_ops.attention.page_indices import page_indices  # noqa: E402
from sglang.srt.layers.triton_ops.scaled import linear  # noqa: E402
from sglang.srt.layers.triton_ops.scaled.linear import empty_rows, round_rows  # noqa: E402

DTYPES = [torch.float32, HALF, *([FP8] if ON_GPU else [])]
SHAPES = [(8, 2, 128), (6, 2, 16), (7, 1, 80), (2, 2, 64)]


def queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Random queries, in half precision if the pool is fp8."""
    return queries_on(tokens, heads, head_dim, HALF if dtype is FP8 else dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("page_size", "splits"),
    [(1, (1, 1)), (16, (4, 100)), (64, None), (128, (16, 1)), (16, (4, LONG_TOKENS))],
)
def test_decode_is_right(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, splits: tuple[int, int] | None
) -> None:
    heads, kv_heads, head_dim = shape
    lens = [1, 130, 64, 63, 300, 17]
    pool = PagedContexts(lens, kv_heads, head_dim, page_size=page_size, dtype=dtype, device=DEVICE)
    q = queries(len(lens), heads, head_dim, dtype)
    seq_lens = torch.tensor(lens, device=DEVICE)
    arrivals = make_arrivals(DEVICE)
    got = decode_attention(
        q,
        pool.k,
        pool.v,
        pool.table,
        pool.rows,
        seq_lens,
        head_dim**-0.5,
        arrivals,
        splits=splits,
    )
    assert not arrivals.any()
    want = [attend(q[i : i + 1], *pool.context(i, n), prefix=n - 1) for i, n in enumerate(lens)]
    assert_close(got, torch.cat(want), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(8, 2, 128), (7, 1, 80)])
@pytest.mark.parametrize("splits", [(1, 1), (4, 100), (256, 32), None, (4, LONG_TOKENS)])
def test_decoding_applies_gates(
    shape: tuple[int, int, int], dtype: torch.dtype, splits: tuple[int, int] | None
) -> None:
    """Parts joined by a kernel of their own, by the last program, and contexts in one part."""
    heads, kv_heads, head_dim = shape
    lens = [1, 130, 64, 300, 2 * LONG_TOKENS + 5]
    pool = PagedContexts(lens, kv_heads, head_dim, page_size=16, dtype=dtype, device=DEVICE)
    q = queries(len(lens), heads, head_dim, dtype)
    both = queries(len(lens), 2 * heads, head_dim, dtype)
    gates, arrivals = both[:, 1::2], make_arrivals(DEVICE)
    at = pool.k, pool.v, pool.table, pool.rows, torch.tensor(lens, device=DEVICE)
    plain = decode_attention(q, *at, head_dim**-0.5, arrivals, splits=splits)
    got = decode_attention(q, *at, head_dim**-0.5, arrivals, gates=gates, splits=splits)
    assert not arrivals.any()
    assert_close(got, plain * gates.flatten(1).sigmoid(), dtype)


@pytest.mark.parametrize("heads", [(8, 2), (3, 1)])
@pytest.mark.parametrize("splits", [(1, 1), (4, 100), (4, LONG_TOKENS)])
def test_decoding_rounds_each_head(heads: tuple[int, int], splits: tuple[int, int]) -> None:
    """A kernel that only rounds gives the same bits, for one part and for several."""
    lens = [1, 130, 300, 2 * LONG_TOKENS + 5]
    pool = PagedContexts(lens, heads[1], 128, page_size=16, dtype=HALF, device=DEVICE)
    q, arrivals = queries(len(lens), heads[0], 128, HALF), make_arrivals(DEVICE)
    at = pool.k, pool.v, pool.table, pool.rows, torch.tensor(lens, device=DEVICE)
    weight = fp8_weight(128, heads[0] * 128, height=128)
    want = round_rows(decode_attention(q, *at, 0.09, arrivals, splits=splits), weight)
    rounded = empty_rows(len(lens), weight, HALF)
    assert rounded is not None
    decode_attention(q, *at, 0.09, arrivals, rounded=rounded, splits=splits)
    assert not arrivals.any()
    assert torch.equal(rounded.elements.view(torch.uint8), want.elements.view(torch.uint8))
    assert torch.equal(rounded.scales, want.scales)


def test_a_backend_rounds_where_a_head_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    layer = SimpleNamespace(head_dim=128, layer_id=7)
    batch = SimpleNamespace(begin_layer=begun.append)
    monkeypatch.setattr(TritonAttnBackend, "_decode", lambda *_: None)
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    q = queries(3, 2, 128, HALF)

    def found(weight: ScaledWeight) -> RoundedRows | None:
        return backend.forward_decode_rounded(q, weight, layer, batch)  # type: ignore[arg-type]

    rounded = found(fp8_weight(128, 256, height=128))
    assert rounded is not None and rounded.elements.shape == (3, 256) and begun == [7]
    assert found(fp8_weight(128, 256, group=256)) is None
    monkeypatch.setattr(linear, "_more_rows", lambda *_: 1)
    assert found(fp8_weight(128, 256, height=128)) is None and begun == [7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("page_size", "splits"), [(1, 1), (16, 4), (64, None)])
def test_extend_is_right(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, splits: int | None
) -> None:
    heads, kv_heads, head_dim = shape
    work = [(0, 1), (0, 140), (200, 33), (64, 64), (63, 2), (290, 1)]
    lens = [prefix + new for prefix, new in work]
    pool = PagedContexts(lens, kv_heads, head_dim, page_size=page_size, dtype=dtype, device=DEVICE)
    q = queries(sum(new for _, new in work), heads, head_dim, dtype)
    segments, begin = [], 0
    for row, (prefix, new) in zip(pool.rows.tolist(), work, strict=True):
        segments.append((row, begin, prefix, new))
        begin += new
    plan = plan_blocks(
        segments,
        group=heads // kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        device=DEVICE,
    )
    plan = dataclasses.replace(plan, splits=splits or plan.splits)
    got = torch.full((len(q), heads * head_dim), float("nan"), dtype=q.dtype, device=DEVICE)
    extend_attention(q, pool.k, pool.v, pool.table, plan, head_dim**-0.5, got)
    want = [
        attend(q[b : b + new], *pool.context(i, prefix + new), prefix=prefix)
        for i, (_, b, prefix, new) in enumerate(segments)
    ]
    assert_close(got, torch.cat(want), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [64, 200])
def test_work_for_any_requests_takes_these(
    shape: tuple[int, int, int], dtype: torch.dtype, size: int
) -> None:
    """One launch for all: other requests each time, and tokens behind them that are nobody's."""
    heads, kv_heads, head_dim = shape
    group = heads // kv_heads
    work = plan_any_blocks(
        size, 5, group=group, num_kv_heads=kv_heads, head_dim=head_dim, device=DEVICE
    )
    for requests in ([(0, 64)], [(700, 33), (0, 1), (65, 1), (9, 2), (300, 20)], [(1000, 5)]):
        lens = [prefix + new for prefix, new in requests]
        pool = PagedContexts(lens, kv_heads, head_dim, page_size=16, dtype=dtype, device=DEVICE)
        q = queries(size, heads, head_dim, dtype)
        begins = [0, *itertools.accumulate(new for _, new in requests)]
        segments = [
            (row, begin, prefix, new)
            for row, begin, (prefix, new) in zip(pool.rows.tolist(), begins, requests, strict=False)
        ]
        put_blocks(work, segments, group)
        got = torch.full((size, heads * head_dim), float("nan"), dtype=q.dtype, device=DEVICE)
        extend_attention(q, pool.k, pool.v, pool.table, work, head_dim**-0.5, got)
        want = [
            attend(q[begin : begin + new], *pool.context(i, prefix + new), prefix=prefix)
            for i, (_, begin, prefix, new) in enumerate(segments)
        ]
        assert_close(got[: begins[-1]], torch.cat(want), dtype)
        assert not got[begins[-1] :].any()


def plan_qwen(*segments: tuple[int, int, int, int]) -> ExtendWork:
    return plan_blocks(segments, group=4, num_kv_heads=8, head_dim=128, device="cpu")


def test_a_short_question_after_a_long_prefix_is_split() -> None:
    short = plan_qwen((0, 0, 8000, 3))
    assert (short.rows, short.splits) == (16, 16)
    long = plan_qwen((5, 7, 8000, 3000))
    blocks = long.blocks.tolist()
    assert (long.rows, long.splits, long.begin, long.end) == (128, 1, 7, 3007)
    assert blocks[0] == [5, 0, 8000, 32]
    assert blocks[-1] == [5, 2976, 8000 + 2976, 24]
    assert sum(block[3] for block in blocks) == 3000


def test_splits_of_decode_fill_the_device() -> None:
    assert [plan_splits(bs, 8)[0] for bs in (1, 4, 16, 32)] == [32, 16, 4, 2]
    assert [plan_splits(bs, 8) for bs in (64, 128, 256)] == [(16, 2048), (8, 2048), (4, 2048)]
    gated = [plan_splits(bs, 2, is_gated=True) for bs in (1, 2, 4, 256)]
    assert gated == [(256, 32), (32, 64), (32, 64), (16, 2048)]


@triton.jit  # type: ignore[untyped-decorator]
def _store_range_kernel(
    out_ptr: tl.tensor,
    last: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    begin, end, parts = split_range(last, split, splits, least, BLOCK_N)
    tl.store(out_ptr + 3 * split, begin)
    tl.store(out_ptr + 3 * split + 1, end)
    tl.store(out_ptr + 3 * split + 2, parts)


@pytest.mark.parametrize(
    ("last", "splits", "least", "parts"),
    [
        (2100, 4, 2048, 1),
        (4096, 4, 2048, 2),
        (4193, 4, 2048, 2),
        (9000, 4, 2048, 4),
        (32768, 4, 2048, 4),
        (63, 8, 64, 1),
        (635, 8, 64, 5),
        (1025, 32, 64, 17),
        (1, 8, 64, 1),
    ],
)
def test_parts_of_a_context_are_not_smaller_than_worth_it(
    last: int, splits: int, least: int, parts: int
) -> None:
    got = torch.zeros(splits, 3, dtype=torch.int64, device=DEVICE)
    _store_range_kernel[(splits,)](got, last, splits, least, BLOCK_N=64)
    ranges = got[:parts].tolist()
    assert [count for _, _, count in got.tolist()] == [parts] * splits
    assert [0, *(end for _, end, _ in ranges)] == [*(begin for begin, _, _ in ranges), last]
    assert all(begin >= end for begin, end, _ in got[parts:].tolist())


@pytest.mark.parametrize("prefix", [0, 1, 500, 1024, 7 * 1024 + 3])
@pytest.mark.parametrize("new", [1, 523, 524, 1024, 1025, 8192])
def test_lengths_for_cudnn_are_few_and_cover_the_context(prefix: int, new: int) -> None:
    plan = plan_dense(prefix, new)
    assert 0 <= plan.count <= new
    assert new - plan.count < UNIT or plan.count == 0
    if plan.count == 0:
        assert prefix % UNIT + new < UNIT + UNIT // 2
        return
    assert (plan.pad + plan.count) % UNIT == 0
    assert plan.whole + plan.pad == prefix
    ends = [0, *(end for _, end in plan.pieces)]
    assert [begin for begin, _ in plan.pieces] == ends[:-1]
    assert ends[-1] == plan.whole
    assert all((end - begin).bit_count() == 1 for begin, end in plan.pieces)


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize("head_dim", [64, 200])
def test_parts_are_joined(
    head_dim: int, with_gates: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program joins a row, or several do. Empty parts are not read; a final row is kept."""
    monkeypatch.setattr(online_softmax, "_PROGRAMS", programs)
    numbers = torch.Generator().manual_seed(head_dim)
    parts = torch.randn(6, 4, head_dim, generator=numbers).to(DEVICE)
    lse = torch.randn(6, 4, generator=numbers).to(DEVICE)
    lse[1, 2], parts[1, 2], lse[4] = float("-inf"), float("nan"), float("inf")
    gates = torch.randn(2, 3, head_dim, generator=numbers).to(DEVICE)
    out = torch.full((2, 3 * head_dim), 7.0, device=DEVICE)
    combine_splits(parts, lse, out, gates if with_gates else None)
    share = torch.softmax(lse * math.log(2), dim=1).nan_to_num(0.0)[:, :, None]
    want = (parts.nan_to_num(0.0) * share).sum(1).view(2, 3, head_dim)
    want = want * gates.sigmoid() if with_gates else want
    want[1, 1] = 7.0
    torch.testing.assert_close(out.view(2, 3, head_dim), want, rtol=1e-5, atol=1e-5)


def test_two_joined_parts_equal_attention_over_both() -> None:
    """Attention over two parts, joined, is attention over both."""
    q = queries(9, 6, 32, torch.float32)
    k, v = (torch.randn(20, 2, 32, device=DEVICE) for _ in range(2))
    outs, masses = [], []
    for part in (slice(0, 7), slice(7, 20)):
        out = attend(q, k[part], v[part], prefix=100).view(9, 6, 32).float()
        scores = torch.einsum("qhd,khd->hqk", q, k[part].repeat_interleave(3, dim=1)) * 32**-0.5
        outs.append(out.contiguous())
        masses.append(scores.logsumexp(dim=-1).contiguous())
    joined = merge_into_(outs[0], masses[0], outs[1], masses[1])
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, dim=1)) * 32**-0.5
    torch.testing.assert_close(joined, scores.logsumexp(dim=-1))
    assert_close(outs[0].flatten(1), attend(q, k, v, prefix=100), torch.float32)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_page_indices_are_the_pages_of_the_slots(page_size: int) -> None:
    lens = [1, 130, 2048 * page_size + 1, 64, 16]
    made = PagedContexts(lens, 1, 16, page_size=page_size, dtype=torch.float32, device=DEVICE)
    counts = [-(-length // page_size) for length in lens]
    indptr = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    got = page_indices(
        made.table,
        made.rows,
        indptr,
        total=sum(counts),
        longest=max(counts),
        page_size=page_size,
    )
    want = [
        made.table[row, :length:page_size] // page_size
        for row, length in zip(made.rows.tolist(), lens, strict=True)
    ]
    assert torch.equal(got, torch.cat(want))

"""Attention over the paged pool against its definition in fp32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.triton_device import triton_device

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

from sglang.srt.layers.attention.dense_attention import UNIT, plan_dense  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.attention.triton_ops.combine import merge_into_  # noqa: E402
from sglang.srt.layers.attention.triton_ops.decode import (  # noqa: E402
    decode_attention,
    plan_splits,
)
from sglang.srt.layers.attention.triton_ops.extend import (  # noqa: E402
    ExtendWork,
    extend_attention,
    plan_blocks,
)
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, HALF, *([FP8] if ON_GPU else [])]
SHAPES = [(8, 2, 128), (6, 2, 16), (7, 1, 80), (2, 2, 64)]


class Pool:
    """Random keys and values in pages that lie in no order, and a table of requests."""

    def __init__(
        self,
        lens: list[int],
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 1,
        dtype: torch.dtype = HALF,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lens) + page_size)
        pages = [-(-length // page_size) for length in lens]
        slots = (sum(pages) + 3) * page_size
        self.k, self.v = (
            torch.randn(slots, kv_heads, head_dim, generator=generator).to(DEVICE).to(dtype)
            for _ in range(2)
        )
        order = torch.randperm(sum(pages) + 2, generator=generator) + 1
        self.table = torch.randint(
            0, slots, (len(lens) + 2, max(lens) + 7), dtype=torch.int32, generator=generator
        )
        self.rows = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)]
        used = 0
        for row, length, count in zip(self.rows.tolist(), lens, pages, strict=True):
            firsts = order[used : used + count].unsqueeze(1) * page_size
            flat = (firsts + torch.arange(page_size)).view(-1)[:length]
            self.table[row, :length] = flat.to(torch.int32)
            used += count
        self.table, self.rows = self.table.to(DEVICE), self.rows.to(DEVICE)

    def context(self, request: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 keys and values of a request, gathered."""
        slots = self.table[self.rows[request], :length].long()
        k, v = (x.float()[slots] for x in (self.k, self.v))
        return k, v


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, prefix: int, window: int = 0
) -> torch.Tensor:
    """The definition, fp64: q `[new, heads, dim]` at positions from `prefix` on."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    q_pos = torch.arange(prefix, prefix + q.shape[0], device=q.device).unsqueeze(1)
    k_pos = torch.arange(k.shape[0], device=q.device)
    hidden = k_pos > q_pos
    if window:
        hidden |= k_pos <= q_pos - window
    probs = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1)


def queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As attention gets them: a slice of the projection."""
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, heads + 2, head_dim, generator=generator)
    dtype = HALF if dtype is FP8 else dtype
    return wide.to(dtype).to(DEVICE)[:, :heads]


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error < (1e-5 if dtype is torch.float32 else 1e-2), error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("page_size", "splits"), [(1, (1, 1)), (16, (4, 100)), (64, None), (128, (16, 1))]
)
def test_decode(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, splits: tuple[int, int] | None
) -> None:
    heads, kv_heads, head_dim = shape
    lens = [1, 130, 64, 63, 300, 17]
    pool = Pool(lens, kv_heads, head_dim, page_size=page_size, dtype=dtype)
    q = queries(len(lens), heads, head_dim, dtype)
    seq_lens = torch.tensor(lens, device=DEVICE)
    for window in (0, 50):
        got = decode_attention(
            q,
            pool.k,
            pool.v,
            pool.table,
            pool.rows,
            seq_lens,
            head_dim**-0.5,
            window=window,
            splits=splits,
        )
        want = [
            attend(q[i : i + 1], *pool.context(i, n), prefix=n - 1, window=window)
            for i, n in enumerate(lens)
        ]
        assert_close(got, torch.cat(want), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("page_size", "splits"), [(1, 1), (16, 4), (64, None)])
def test_extend(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, splits: int | None
) -> None:
    heads, kv_heads, head_dim = shape
    work = [(0, 1), (0, 140), (200, 33), (64, 64), (63, 2), (290, 1)]
    lens = [prefix + new for prefix, new in work]
    pool = Pool(lens, kv_heads, head_dim, page_size=page_size, dtype=dtype)
    q = queries(sum(new for _, new in work), heads, head_dim, dtype)
    segments, begin = [], 0
    for row, (prefix, new) in zip(pool.rows.tolist(), work, strict=True):
        segments.append((row, begin, prefix, new))
        begin += new
    for window in (0, 50):
        plan = plan_blocks(
            segments,
            group=heads // kv_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            device=DEVICE,
            window=window,
        )
        plan = dataclasses.replace(plan, splits=splits or plan.splits)
        got = torch.full((len(q), heads * head_dim), float("nan"), dtype=q.dtype, device=DEVICE)
        extend_attention(q, pool.k, pool.v, pool.table, plan, head_dim**-0.5, got, window=window)
        want = [
            attend(q[b : b + new], *pool.context(i, prefix + new), prefix=prefix, window=window)
            for i, (_, b, prefix, new) in enumerate(segments)
        ]
        assert_close(got, torch.cat(want), dtype)


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
    assert [plan_splits(bs, 8) for bs in (64, 256)] == [(4, 2048)] * 2


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


def test_merge() -> None:
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


@pytest.mark.skipif(not ON_GPU, reason="cuDNN needs a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("page_size", [1, 64])
def test_backend_mixes_long_and_short_requests(page_size: int, kv_dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 8, 2, 128
    work = [(0, 1030), (300, 40), (1700, 1500), (0, 5), (3072, 2048), (0, 2048)]
    lens = [prefix + new for prefix, new in work]
    made = Pool(lens, kv_heads, head_dim, page_size=page_size, dtype=kv_dtype)
    size = made.k.shape[0] - page_size
    pool = MHATokenToKVPool(size, page_size, kv_dtype, kv_heads, head_dim, 1, DEVICE)
    for buffer, values in zip((pool.k_buffer[0], pool.v_buffer[0]), (made.k, made.v), strict=True):
        buffer.copy_(values.view(pool.store_dtype))
    table = ReqToTokenPool(made.table.shape[0], made.table.shape[1], DEVICE)
    table.req_to_token.copy_(made.table)
    loc = torch.cat(
        [
            made.table[row, prefix : prefix + new].long()
            for row, (prefix, new) in zip(made.rows.tolist(), work, strict=True)
        ]
    )
    q = queries(len(loc), heads, head_dim, kv_dtype)
    k, v = (x.to(torch.bfloat16)[loc] for x in (made.k, made.v))
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=loc,
        positions=loc,
        req_pool_indices=made.rows,
        seq_lens=torch.tensor(lens, device=DEVICE),
        seq_lens_cpu=lens,
        out_cache_loc=loc,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        extend_prefix_lens_cpu=[prefix for prefix, _ in work],
        extend_seq_lens_cpu=[new for _, new in work],
    )
    backend = TritonAttnBackend(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    backend.init_forward_metadata(batch)
    layer = RadixAttention(heads, head_dim, head_dim**-0.5, kv_heads, 0)
    got = backend.forward(q, k, v, layer, batch)
    begin = 0
    for i, (prefix, new) in enumerate(work):
        want = attend(q[begin : begin + new], *made.context(i, prefix + new), prefix=prefix)
        assert_close(got[begin : begin + new], want, torch.bfloat16)
        begin += new


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

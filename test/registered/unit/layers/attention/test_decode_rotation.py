"""Attention of one token that rotates and stores: the bits of a kernel before it that does so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()

from rigs.models.attention_cases import PagedContexts  # noqa: E402
from rigs.models.kernel_layers import HALF, randn  # noqa: E402
from sglang.srt.layers.triton_ops.attention import decode_attention as decode  # noqa: E402
from sglang.srt.layers.triton_ops.attention.decode_attention import (  # noqa: E402
    NewTokens,
    decode_attention,
    make_arrivals,
)
from sglang.srt.layers.triton_ops.fused_qkv import normalise_rotate_store_  # noqa: E402

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
LENS = [1, 64, 65, 130, 300]


class Step:
    """A decode step of requests whose newest keys and values are not stored yet."""

    def __init__(self, dtype: torch.dtype) -> None:
        heads = GROUP * KV_HEADS
        self.contexts = PagedContexts(
            LENS, KV_HEADS, HEAD_DIM, page_size=16, dtype=dtype, device=DEVICE
        )
        self.lens = torch.tensor(LENS, device=DEVICE)
        self.loc = self.contexts.table[self.contexts.rows, self.lens - 1].long()
        for place in (self.contexts.k, self.contexts.v):
            place[self.loc] = float("nan")
        self.qkv = randn(len(LENS), heads + 2 * KV_HEADS, HEAD_DIM, seed=1, dtype=dtype)
        cos, sin = randn(2, len(LENS), 1, HEAD_DIM, seed=2, dtype=dtype)
        self.angles = cos, sin
        self.sinks = randn(heads, seed=3)

    def attend(self, rotates: bool, **options: Any) -> list[torch.Tensor]:
        """The output and the pool after the step."""
        pool, qkv = self.contexts, self.qkv.clone()
        k_pool, v_pool = pool.k.clone(), pool.v.clone()
        q, k, v = torch.split(qkv, [GROUP * KV_HEADS, KV_HEADS, KV_HEADS], dim=1)
        new: NewTokens | None = NewTokens(k, v, self.loc, *self.angles)
        if not rotates:
            normalise_rotate_store_(qkv, None, self.angles, self.loc, k_pool, v_pool)
            new = None
        out = decode_attention(
            q, k_pool, v_pool, pool.table, pool.rows, self.lens, 0.2, make_arrivals(DEVICE),
            sinks=self.sinks, new=new, **options,
        )  # fmt: skip
        return [out, k_pool, v_pool]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [(1, 1), (4, 100), (8, 64), None])
def test_a_step_that_rotates_has_the_bits_of_two_kernels(
    dtype: torch.dtype, splits: tuple[int, int] | None
) -> None:
    """Contexts in one part and in several; the newest token is alone in a block, or not."""
    step = Step(dtype)
    got, want = (step.attend(rotates, splits=splits) for rotates in (True, False))
    assert got[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter shows what is read before the wait")
@pytest.mark.parametrize("splits", [(1, 1), (4, 64)])
def test_queries_and_new_keys_are_read_after_the_wait(
    splits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product before it ends at the last moment."""
    step = Step(torch.float32)
    want = step.attend(False, splits=splits)
    kept, places = step.qkv.clone(), list[torch.Tensor]()  # the interpreter's copies

    names = decode._decode_kernel.arg_names
    first = names.index("new_k_ptr")

    def note(*arguments: Any, **_: Any) -> None:
        places[:] = [arguments[names.index("q_ptr")], *arguments[first : first + 2]]

    def put(_: Any) -> None:
        heads = GROUP * KV_HEADS
        parts = torch.split(kept, [heads, KV_HEADS, KV_HEADS], dim=1)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)

    step.qkv.fill_(float("nan"))
    monkeypatch.setattr(decode._decode_kernel, "pre_run_hooks", [note])
    monkeypatch.setattr(decode, "await_kernels_before", put)
    monkeypatch.setattr(decode, "early_start", lambda _, **__: {"EARLY": 1})
    got = step.attend(True, splits=splits)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

"""torch_native attention against the definition, over views, gathers and mixtures of both."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
from typing import Any

import pytest
import torch

from rigs.models.attention_cases import PagedContexts, assert_close, attention_layer, queries
from sglang.srt.configs.mla_config import MLAConfig
from sglang.srt.layers.attention import attention_registry, partial_attention
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.partial_attention import (
    Partial,
    RunningAttention,
    _attend_plainly,
    attend,
    merge_parts,
    merge_two,
    with_sinks,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention_kind import DSA
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardBatch, ForwardMode
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.state_spec import KVSpec
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

HEADS, KV_HEADS, DIM = 6, 2, 8
KV = KVSpec.of_heads((0,), KV_HEADS, DIM, torch.float32)
CONFIG = AttentionConfig(
    num_heads=HEADS, specs={KV.name: KV}, page_size=1, dtype=torch.float32, device="cpu"
)
POOL = 1024


SINKS = torch.tensor([-30.0, -1.0, 0.0, 0.5, 3.0, 30.0])


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of `q` are the last tokens of the context that `k` and `v` hold; fp64, head by head."""
    out = torch.empty(q.shape, dtype=torch.float64)
    first = len(k) - len(q)
    for row in range(len(q)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            keys, values = k[: first + row + 1, kv_head], v[: first + row + 1, kv_head]
            scores = keys.double() @ q[row, head].double() * DIM**-0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            out[row, head] = scores.softmax(0)[: len(values)] @ values.double()
    return out.reshape(len(q), -1).float()


class Bench:
    """A pool with two layers of random data and requests laid out as told."""

    def __init__(self, contexts: list[torch.Tensor], sinks: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = MHATokenToKVPool(POOL, 1, torch.float32, KV_HEADS, DIM, 2, "cpu")
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        self.rows = ReqToTokenPool(len(contexts), POOL, "cpu")
        self.contexts = contexts
        for row, slots in enumerate(contexts):
            self.rows.req_to_token[row, : len(slots)] = slots.to(torch.int32)
        self.layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 1, sinks=sinks)
        self.generator = generator

    def run(self, mode: ForwardMode, new: list[int], view_tokens: int) -> None:
        """Attend with the backend and compare; `new` tokens end each context."""
        lens = [len(slots) for slots in self.contexts]
        loc = torch.cat([s[len(s) - n :] for s, n in zip(self.contexts, new, strict=True)])
        total = sum(new)
        q = torch.randn(total, HEADS, DIM, generator=self.generator)
        kv = torch.randn(total, 2 * KV_HEADS, DIM, generator=self.generator)
        k, v = kv[:, :KV_HEADS], kv[:, KV_HEADS:]
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=loc,
            positions=loc,
            req_pool_indices=torch.arange(len(lens)),
            seq_lens=torch.tensor(lens),
            seq_lens_cpu=lens,
            out_cache_loc=loc,
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
            extend_prefix_lens_cpu=[a - b for a, b in zip(lens, new, strict=True)],
            extend_seq_lens_cpu=new,
        )
        backend = TorchNativeAttnBackend(CONFIG, view_bytes=view_tokens * KV.layer_bytes)
        backend.init_forward_metadata(batch)
        got = backend.forward(AttentionInputs(q, k, v), self.layer, batch)
        assert torch.equal(self.pool.k_buffer[1][loc], k)
        want = [
            definition(
                rows, self.pool.k_buffer[1][slots], self.pool.v_buffer[1][slots], self.layer.sinks
            )
            for rows, slots in zip(torch.split(q, new), self.contexts, strict=True)
        ]
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)
        if mode is ForwardMode.EXTEND:
            rows = batch.rows_for_logits()
            last = backend.forward(AttentionInputs(q, k, v, rows=rows), self.layer, batch)
            ends = torch.cat([rows[-1:] for rows in want])
            torch.testing.assert_close(last, ends, rtol=1e-5, atol=1e-5)


def contexts(kind: str) -> list[torch.Tensor]:
    scattered = torch.randperm(200, generator=torch.Generator().manual_seed(3)) + 600
    whole = [torch.arange(1, 40), torch.arange(100, 105), torch.arange(300, 390)]
    if kind == "whole":
        return whole
    if kind == "scattered":
        return [scattered[:50], scattered[50:53], scattered[53:150]]
    return [whole[0], torch.cat([whole[2], scattered[:20]]), scattered[20:33], whole[1]]


has_sinks = pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])


@has_sinks
@pytest.mark.parametrize("view_tokens", [1, 16, 1000])
@pytest.mark.parametrize("kind", ["whole", "scattered", "mixed"])
def test_decode_is_right(kind: str, view_tokens: int, sinks: torch.Tensor | None) -> None:
    bench = Bench(contexts(kind), sinks)
    bench.run(ForwardMode.DECODE, [1] * len(bench.contexts), view_tokens)


@has_sinks
@pytest.mark.parametrize("kind", ["whole", "scattered", "mixed"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_extend_is_right(kind: str, share: float, sinks: torch.Tensor | None) -> None:
    bench = Bench(contexts(kind), sinks)
    new = [max(1, int(len(slots) * share)) for slots in bench.contexts]
    bench.run(ForwardMode.EXTEND, new, 16)


@has_sinks
def test_one_request_alone_equals_the_definition(sinks: torch.Tensor | None) -> None:
    for view_tokens in (1, 1000):
        Bench([torch.arange(5, 60)], sinks).run(ForwardMode.DECODE, [1], view_tokens)
        Bench([torch.arange(5, 60)], sinks).run(ForwardMode.EXTEND, [55], view_tokens)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("view_tokens", [1, 1000])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "extend"])
def test_a_token_that_is_cached_is_stored_as_padding(
    is_decode: bool, view_tokens: int, page_size: int
) -> None:
    """Decoding reads it from its page, extending takes it as it is computed."""
    lens = [16, 64, 320]
    made = PagedContexts(
        lens, KV_HEADS, DIM, page_size=page_size, dtype=torch.float32, device="cpu"
    )
    prefixes = [length - 1 for length in lens]
    batch = made.decode_batch() if is_decode else made.extend_batch(prefixes)
    last, batch.out_cache_loc = batch.out_cache_loc, torch.zeros_like(batch.out_cache_loc)
    config = dataclasses.replace(CONFIG, page_size=page_size)
    backend = TorchNativeAttnBackend(config, view_bytes=view_tokens * KV.layer_bytes)
    backend.init_forward_metadata(batch)
    q = queries(len(lens), HEADS, DIM, torch.float32, "cpu")
    k, v = made.k[last], made.v[last]
    if is_decode:
        k, v = torch.zeros_like(k), torch.zeros_like(v)
    got = backend.forward(AttentionInputs(q, k, v), attention_layer(HEADS, KV_HEADS, DIM), batch)
    want = [attend_by_definition(q, made, i, length) for i, length in enumerate(lens)]
    assert_close(got, torch.cat(want), torch.float32)
    stored, _ = batch.token_to_kv_pool.get_kv_buffer(0)
    assert torch.equal(stored[page_size:], made.k[page_size:])


def attend_by_definition(
    q: torch.Tensor, made: PagedContexts, request: int, length: int
) -> torch.Tensor:
    """Attention from the last of `length` tokens."""
    return definition(q[request : request + 1], *made.context(request, length)).double()


def random_qkv(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(2, HEADS, rows, DIM, generator=generator)
    k, v = torch.randn(2, 2, KV_HEADS, keys, DIM, generator=generator).unbind(0)
    return q, k, v


@pytest.mark.parametrize("score_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_the_kernel_and_elementary_operations_agree(
    monkeypatch: pytest.MonkeyPatch, causal: bool, masked: bool, score_bytes: int
) -> None:
    monkeypatch.setattr(partial_attention, "SCORE_BYTES", score_bytes)
    q, k, v = random_qkv(11, 11)
    mask: torch.Tensor | None = None
    if masked:
        mask = torch.zeros(2, 1, 1, 11)
        mask[1, ..., 6:] = -torch.inf
    kernel = attend(q, k, v, scale=0.3, causal=causal, mask=mask)
    plain = _attend_plainly(q, k, v, scale=0.3, causal=causal, mask=mask)
    torch.testing.assert_close(kernel.out, plain.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kernel.lse, plain.lse, rtol=1e-5, atol=1e-5)


def test_parts_join_to_the_whole_even_where_one_weighs_nothing() -> None:
    q, k, v = random_qkv(3, 90)
    k[:, :, 40:70] *= 100  # scores far apart: a naive sum of exponentials overflows
    whole = attend(q, k, v, scale=1.0)
    pieces = [
        attend(q, k[:, :, a:b], v[:, :, a:b], scale=1.0) for a, b in [(0, 40), (40, 70), (70, 90)]
    ]
    stacked = Partial(torch.cat([p.out for p in pieces]), torch.cat([p.lse for p in pieces]))
    got = merge_parts(stacked, torch.tensor([0, 1] * 3), 2).out
    torch.testing.assert_close(got, whole.out, rtol=1e-4, atol=1e-5)
    two = attend(q, k[:, :, 40:], v[:, :, 40:], scale=1.0)
    torch.testing.assert_close(merge_two(pieces[0], two), whole.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("v_head_dim", [3, 8, 13])
def test_values_may_be_of_another_size_than_keys(v_head_dim: int) -> None:
    q, k, _ = random_qkv(5, 20)
    v = torch.randn(*k.shape[:-1], v_head_dim, generator=torch.Generator().manual_seed(5))
    kernel, plain = (
        attend(q, k, v, scale=0.3),
        _attend_plainly(q, k, v, scale=0.3, causal=False, mask=None),
    )
    torch.testing.assert_close(kernel.out, plain.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kernel.lse, plain.lse, rtol=1e-5, atol=1e-5)


def test_parts_are_added_one_after_the_other() -> None:
    q, k, v = random_qkv(5, 60)
    k[:, :, 20:30] *= 100
    running = RunningAttention(attend(q, k[:, :, :20], v[:, :, :20], scale=1.0))
    for a, b in ((20, 50), (50, 60)):
        running.add_(attend(q, k[:, :, a:b], v[:, :, a:b], scale=1.0))
    whole = attend(q, k, v, scale=1.0)
    torch.testing.assert_close(running.out, whole.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(running.lse, whole.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", [1, 2, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_one_more_logit_without_a_value(keys: int, dtype: torch.dtype) -> None:
    """Rows with few keys as well: their log-sum-exp is as exact as that of many."""
    q, k, v = (x.to(dtype) for x in random_qkv(3, keys))
    got = with_sinks(attend(q, k, v, scale=1.0), SINKS.unsqueeze(1)).out
    wide_k, wide_v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    column = SINKS.double().view(1, HEADS, 1, 1).expand(2, HEADS, 3, 1)
    scores = torch.cat([q.double() @ wide_k.transpose(-1, -2), column], dim=-1)
    want = scores.softmax(-1)[..., :-1] @ wide_v
    rtol, atol = (0.02, 0.02) if dtype is torch.bfloat16 else (2e-5, 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "device", "able"),
    [
        ("flashinfer", "cuda:0", "triton or torch_native"),
        ("ascend", "npu:0", "torch_native"),
    ],
)
def test_a_backend_that_does_not_know_sinks_refuses_them(name: str, device: str, able: str) -> None:
    config = dataclasses.replace(CONFIG, device=device, has_sinks=True)
    wanted = f"{name!r} does not support attention sinks, .* use --attention-backend {able}$"
    with pytest.raises(ValueError, match=wanted):
        create_attention_backend(name, config)
    create_attention_backend("torch_native", dataclasses.replace(config, device="cpu"))


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'flashy' is not supported: supported are torch_native"):
        create_attention_backend("flashy", CONFIG)
    known = "supported are torch_native, ascend"
    with pytest.raises(ValueError, match=f"'flashy' is not supported: {known}"):
        create_attention_backend("flashy", dataclasses.replace(CONFIG, device="npu:0"))
    with pytest.raises(ValueError, match="device 'mps' is not supported; use cuda or npu or cpu"):
        create_attention_backend("torch_native", dataclasses.replace(CONFIG, device="mps"))


def test_flashinfer_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
        return {"specs": {KV.name: KVSpec.of_heads((0,), KV_HEADS, head_dim, dtype)}}

    half = dataclasses.replace(CONFIG, dtype=torch.bfloat16, **keeping(DIM, torch.bfloat16))
    with pytest.raises(ValueError, match="'flashinfer' does not run on 'cpu': use torch_native"):
        create_attention_backend("flashinfer", half)
    half = dataclasses.replace(half, device="cuda:0")
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install flashinfer-python, or use triton"):
        create_attention_backend("flashinfer", half)
    found = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.float32}, "--dtype bfloat16 or float16"),
        (keeping(64, torch.float8_e4m3fn), "--kv-cache-dtype auto, not torch.bfloat16"),
        (keeping(80, torch.bfloat16), "a head_dim of 64, 128, 256, not 80"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=message):
            create_attention_backend("flashinfer", dataclasses.replace(half, **fields))


def test_flashmla_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(rank: int, rope: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        mla = MLAConfig(
            kv_lora_rank=rank, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=rope,
            v_head_dim=128, rope_interleave=True,
        )  # fmt: skip
        spec = MLASpec.of((0,), rank, rope, dtype)
        return {"mla": mla, "specs": {spec.name: spec}}

    right = dataclasses.replace(CONFIG, dtype=torch.bfloat16, device="cuda:0", **sizes(512, 64))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu"}, "'flashmla' does not run on 'cpu': use torch_native"),
        ({"dtype": torch.float32}, "takes --dtype bfloat16 and --kv-cache-dtype auto, not"),
        (sizes(512, 64, torch.float8_e4m3fn), "rows in torch.float8_e4m3fn: use triton"),
        (sizes(256, 64), "a kv_lora_rank of 512 and a qk_rope_head_dim of 64 or 0, not 256 and 64"),
        (sizes(512, 32), "not 512 and 32: use triton"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=message):
            create_attention_backend("flashmla", dataclasses.replace(right, **fields), DSA)
    made = []
    monkeypatch.setattr(
        attention_registry, "_imported", lambda path: lambda config: made.append(path)
    )
    create_attention_backend("flashmla", right, DSA)
    assert made == ["flashmla_backend.FlashMLABackend"]

"""Attention backends of GPUs against the definition: extend, decode, and decode in graphs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from rigs.models.attention_cases import (
    FP8,
    PagedContexts,
    assert_close,
    attend,
    attention_layer,
    queries,
)
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardBatch
from sglang.srt.mem_cache.device.state_spec import KVSpec
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
BACKENDS = [
    "triton",
    pytest.param(
        "flashinfer",
        marks=pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer-python is not installed"),
    ),
]
BF16 = torch.bfloat16
SHAPES = [(8, 2, 128), (4, 4, 128)]
"""Query heads, KV heads, head_dim: groups of 4, and of 1."""


def make(
    name: str, shape: tuple[int, int, int], page_size: int, kv_dtype: torch.dtype = BF16
) -> AttentionBackend:
    heads, kv_heads, head_dim = shape
    kv = KVSpec.of_heads((0,), kv_heads, head_dim, kv_dtype)
    return create_attention_backend(
        name,
        AttentionConfig(
            num_heads=heads, specs={kv.name: kv}, page_size=page_size, dtype=BF16, device="cuda"
        ),
    )


def contexts(
    lens: list[int], shape: tuple[int, int, int], page_size: int, kv_dtype: torch.dtype = BF16
) -> PagedContexts:
    return PagedContexts(
        lens, shape[1], shape[2], page_size=page_size, dtype=kv_dtype, device="cuda"
    )


def check_extend(
    name: str,
    shape: tuple[int, int, int],
    page_size: int,
    work: list[tuple[int, int]],
    kv_dtype: torch.dtype = BF16,
) -> None:
    """Work: for each request, its tokens in the pool and its new tokens."""
    made = contexts([prefix + new for prefix, new in work], shape, page_size, kv_dtype)
    batch = made.extend_batch([prefix for prefix, _ in work])
    backend = make(name, shape, page_size, kv_dtype)
    backend.init_forward_metadata(batch)
    loc = batch.out_cache_loc
    q = queries(len(loc), shape[0], shape[2], BF16, "cuda")
    # Keys and values lie beside each other, as a projection returns them: strides are not dense.
    kv = torch.stack([made.k.to(BF16)[loc], made.v.to(BF16)[loc]], dim=1)
    layer = attention_layer(*shape)
    inputs = AttentionInputs(q, kv[:, 0], kv[:, 1])
    got = backend.forward(inputs, layer, batch)
    last = backend.forward(inputs._replace(rows=batch.rows_for_logits()), layer, batch)
    begin = 0
    for i, (prefix, new) in enumerate(work):
        want = attend(q[begin : begin + new], *made.context(i, prefix + new), prefix=prefix)
        assert_close(got[begin : begin + new], want, BF16)
        assert_close(last[i], want[-1], BF16)
        begin += new


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_extend_is_right(name: str, shape: tuple[int, int, int], page_size: int) -> None:
    check_extend(name, shape, page_size, [(0, 1), (0, 140), (200, 33), (64, 64), (63, 2), (290, 1)])
    check_extend(name, shape, page_size, [(0, 1), (0, 700), (0, 129)])  # no prefix at all
    check_extend(name, shape, page_size, [(100, 600), (5, 1), (0, 77)])
    check_extend(name, shape, page_size, [(4000, 3), (128, 130)])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_long_and_short_requests_mixed_equal_the_definition(name: str, page_size: int) -> None:
    work = [(0, 1030), (300, 40), (1700, 1500), (0, 5), (3072, 2048), (0, 2048)]
    check_extend(name, (8, 2, 128), page_size, work)
    if name == "triton":
        check_extend(name, (8, 2, 128), page_size, work, FP8)


def test_sinks_count_in_long_and_short_prefills() -> None:
    """Through cuDNN, with prefixes in pieces, and through the paged kernel."""
    shape, work = (8, 2, 64), [(0, 1030), (300, 40), (1700, 1500), (0, 5), (3072, 2048)]
    made = contexts([prefix + new for prefix, new in work], shape, 16)
    batch = made.extend_batch([prefix for prefix, _ in work])
    backend, layer = make("triton", shape, 16), attention_layer(*shape)
    layer.sinks = torch.linspace(-4.0, 12.0, shape[0], device="cuda")
    backend.init_forward_metadata(batch)
    loc = batch.out_cache_loc
    q = queries(len(loc), shape[0], shape[2], BF16, "cuda")
    inputs = AttentionInputs(q, made.k[loc], made.v[loc])
    got = backend.forward(inputs, layer, batch)
    last = backend.forward(inputs._replace(rows=batch.rows_for_logits()), layer, batch)
    begin = 0
    for i, (prefix, new) in enumerate(work):
        own = slice(begin, begin + new)
        want = attend(q[own], *made.context(i, prefix + new), prefix=prefix, sinks=layer.sinks)
        assert_close(got[own], want, BF16)
        assert_close(last[i], want[-1], BF16)
        begin += new


def check_decode(made: PagedContexts, got: torch.Tensor, q: torch.Tensor, lens: list[int]) -> None:
    want = [attend(q[i : i + 1], *made.context(i, n), prefix=n - 1) for i, n in enumerate(lens)]
    assert_close(got, torch.cat(want), BF16)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_decode_is_right(name: str, shape: tuple[int, int, int], page_size: int) -> None:
    lens = [1, 130, 64, 63, 300, 17, 5000]
    made = contexts(lens, shape, page_size)
    batch = made.decode_batch()
    backend = make(name, shape, page_size)
    backend.init_forward_metadata(batch)
    q = queries(len(lens), shape[0], shape[2], BF16, "cuda")
    got = backend.forward(AttentionInputs(q, q, q, False), attention_layer(*shape), batch)
    check_decode(made, got, q, lens)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "extend"])
def test_a_cached_token_is_read_from_its_page(name: str, page_size: int, is_decode: bool) -> None:
    """The last token of a prompt that is cached whole is stored as padding."""
    shape, lens = (8, 2, 128), [64, 640, 4096]
    made = contexts(lens, shape, page_size)
    prefixes = [length - 1 for length in lens]
    batch = made.decode_batch() if is_decode else made.extend_batch(prefixes)
    batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
    backend = make(name, shape, page_size)
    backend.init_forward_metadata(batch)
    q = queries(len(lens), shape[0], shape[2], BF16, "cuda")
    other = q[:, : shape[1]].contiguous()
    got = backend.forward(AttentionInputs(q, other, other), attention_layer(*shape), batch)
    check_decode(made, got, q, lens)
    stored, _ = batch.token_to_kv_pool.get_kv_buffer(0)
    assert torch.equal(stored[page_size:], made.k[page_size:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_graph_replays_whatever_the_lengths_become(name: str, page_size: int) -> None:
    """Captured with contexts of one token, replayed with short ones, long ones, short ones."""
    shape, count = (8, 2, 128), 6
    backend, layer = make(name, shape, page_size), attention_layer(*shape)
    longest = contexts([9000] * count, shape, page_size)
    batch = longest.decode_batch()
    q = queries(count, shape[0], shape[2], BF16, "cuda").clone()
    batch.seq_lens_cpu = [1] * count
    batch.seq_lens.fill_(1)

    def forward() -> torch.Tensor:
        return backend.forward(AttentionInputs(q, q, q, False), layer, batch)

    got = captured(backend, batch, forward)
    for seed, lens in enumerate(
        ([5, 6, 7, 8, 9, 70], [9000, 1, 64, 65, 8000, 3000], [9000] * count, [1, 2, 3, 4, 5, 6])
    ):
        q.copy_(queries(count + seed, shape[0], shape[2], BF16, "cuda")[:count])
        batch.seq_lens_cpu = list(lens)
        batch.seq_lens.copy_(torch.tensor(lens))
        # Twice: a plan must not overtake the copy of the one before.
        for _ in range(2):
            backend.init_forward_metadata_graph(batch)
            got.graph.replay()
        check_decode(longest, got.out, q, list(lens))


class Captured:
    def __init__(self, graph: Any, out: torch.Tensor) -> None:
        self.graph, self.out = graph, out


def captured(backend: AttentionBackend, batch: ForwardBatch, forward: Any) -> Captured:
    backend.init_forward_metadata_graph(batch)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # noqa: TID251
    stream.wait_stream(torch.cuda.current_stream())  # noqa: TID251
    with torch.cuda.stream(stream):  # noqa: TID251
        forward()
    graph = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph, stream=stream):  # noqa: TID251
        out = forward()
    return Captured(graph, out)

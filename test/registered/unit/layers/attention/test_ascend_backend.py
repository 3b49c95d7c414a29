"""`ascend` attention over an operator that computes what torch_npu's documentation says.

It refuses what the documentation rules out. On a machine with an NPU the fake stands before the
library too: what is tested is how the backend calls it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.attention_cases import (
    PagedContexts,
    assert_close,
    attend,
    attention_layer,
    queries,
)
from rigs.models.recorded_calls import fake_torch_npu
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.ascend_backend import AscendAttnBackend
from sglang.srt.layers.attention.attention_registry import (
    create_attention_backend,
    default_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention_kind import FULL_ATTENTION
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardBatch
from sglang.srt.mem_cache.device.state_spec import KVSpec
from sglang.test.ci.ci_register import register_cpu_ci, register_npu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_npu_ci(est_time=4, suite="base-a-test-npu")

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 16
BF16 = torch.bfloat16


class Operator:
    """`npu_fused_infer_attention_score` as documented, in fp64."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        """`pages` or `pieces`, and queries."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        num_heads: int,
        num_key_value_heads: int,
        scale: float,
        input_layout: str,
        atten_mask: torch.Tensor | None = None,
        sparse_mode: int = 0,
        block_table: torch.Tensor | None = None,
        actual_seq_lengths_kv: list[int] | None = None,
        block_size: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert input_layout == "BSND"
        assert query.dtype == key.dtype == value.dtype
        assert query.dtype in (torch.float16, BF16)
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        assert query.shape[2:] == (num_heads, DIM)
        assert scale == DIM**-0.5
        num_queries = query.shape[1]
        if num_queries > 1:
            assert sparse_mode == 3
            assert atten_mask is not None
            assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        else:
            assert atten_mask is None
        if block_table is None:
            assert key.shape == value.shape == (1, key.shape[1], num_key_value_heads, DIM)
            contexts = [(key[0], value[0])]
        else:
            assert num_queries == 1
            assert actual_seq_lengths_kv is not None
            lens = actual_seq_lengths_kv
            self._check_pages(key, block_table, lens, block_size)
            contexts = [
                (self._read(key, blocks, n), self._read(value, blocks, n))
                for blocks, n in zip(block_table, lens, strict=True)
            ]
        self.calls.append(("pieces" if block_table is None else "pages", query.shape[0]))
        out = torch.empty_like(query)
        for request, (k, v) in enumerate(contexts):
            rows = attend(query[request], k, v, prefix=len(k) - num_queries)
            out[request] = rows.view(num_queries, num_heads, DIM).to(query.dtype)
        return out, torch.zeros(1)

    def _check_pages(
        self, key: torch.Tensor, block_table: torch.Tensor, lens: list[int], block_size: int
    ) -> None:
        assert key.shape[1:] == (block_size, KV_HEADS * DIM)
        assert block_size % 16 == 0
        assert block_size <= 512
        assert block_table.dtype is torch.int32
        needed = [-(-length // block_size) for length in lens]
        assert block_table.shape == (len(lens), max(needed))
        assert sum(needed) <= key.shape[0]

    @staticmethod
    def _read(pages: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        used = blocks[: -(-length // pages.shape[1])].long()
        return pages[used].reshape(-1, KV_HEADS, DIM)[:length]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator()
    module = fake_torch_npu([], {})
    vars(module)["npu_fused_infer_attention_score"] = made
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return made


def config(page_size: int = PAGE, dtype: torch.dtype = BF16, **fields: Any) -> AttentionConfig:
    kv = KVSpec.of_heads((0,), KV_HEADS, fields.pop("head_dim", DIM), dtype)
    values: dict[str, Any] = {"num_heads": HEADS, "dtype": dtype, "device": "cpu", **fields}
    return AttentionConfig(specs={kv.name: kv}, page_size=page_size, **values)


def contexts(lens: list[int], page_size: int = PAGE) -> PagedContexts:
    return PagedContexts(lens, KV_HEADS, DIM, page_size=page_size, dtype=BF16, device="cpu")


def run(
    backend: AscendAttnBackend | TorchNativeAttnBackend,
    q: torch.Tensor,
    batch: ForwardBatch,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    layer = attention_layer(HEADS, KV_HEADS, DIM)
    backend.init_forward_metadata(batch)
    k, v = (buffer[batch.out_cache_loc] for buffer in batch.token_to_kv_pool.get_kv_buffer(0))
    return backend.forward(AttentionInputs(q, k, v, rows=rows), layer, batch)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_decode_reads_pages_in_place(operator: Operator, page_size: int) -> None:
    lens = [1, 16, 17, 200, 64]
    case = contexts(lens, page_size)
    q = queries(len(lens), HEADS, DIM, BF16, "cpu")
    batch = case.decode_batch()
    got = run(AscendAttnBackend(config(page_size)), q, batch)
    assert operator.calls == [("pages", 5)]
    want = [
        attend(q[i : i + 1], *case.context(i, length), prefix=length - 1)
        for i, length in enumerate(lens)
    ]
    assert_close(got, torch.cat(want), BF16)
    assert_close(got, run(TorchNativeAttnBackend(config(page_size)), q, batch).double(), BF16)


def test_prefixes_that_requests_share_are_more_pages_than_the_pool_has(operator: Operator) -> None:
    case = contexts([40, 33])  # 6 pages, in a pool of 9
    once = case.decode_batch()
    batch = dataclasses.replace(
        once,
        req_pool_indices=once.req_pool_indices.repeat(3),
        seq_lens_cpu=once.seq_lens_cpu * 3,
        out_cache_loc=once.out_cache_loc.repeat(3),
    )
    q = queries(2, HEADS, DIM, BF16, "cpu").repeat(3, 1, 1)
    got = run(AscendAttnBackend(config()), q, batch)
    assert operator.calls == [("pages", 3), ("pages", 3)]
    assert torch.equal(got, run(AscendAttnBackend(config()), q[:2], once).repeat(3, 1))


@pytest.mark.parametrize("prefixes", [[0, 0, 0], [16, 31, 0], [69, 32, 4]])
def test_prefill_attends_to_the_prefix_and_causally(
    operator: Operator, prefixes: list[int]
) -> None:
    lens = [70, 40, 5]
    case = contexts(lens)
    batch = case.extend_batch(prefixes)
    new = [length - prefix for length, prefix in zip(lens, prefixes, strict=True)]
    q = queries(sum(new), HEADS, DIM, BF16, "cpu")
    backend = AscendAttnBackend(config())
    got = run(backend, q, batch)
    parts = torch.split(q, new)
    want = torch.cat(
        [
            attend(part, *case.context(i, lens[i]), prefix=prefixes[i])
            for i, part in enumerate(parts)
        ]
    )
    assert_close(got, want, BF16)
    assert operator.calls == [("pieces", 1)] * 3
    ends = torch.tensor(new).cumsum(0) - 1
    assert_close(run(backend, q, batch, rows=ends), want[ends], BF16)


def test_a_model_computes_what_it_does_by_torch_native(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = attention_registry._BACKENDS[FULL_ATTENTION, "ascend", "npu"]
    monkeypatch.setitem(attention_registry._BACKENDS, (FULL_ATTENTION, "ascend", "cpu"), make)
    save_tiny_checkpoint(tmp_path, "qwen3")
    logits = []
    for name, dtype in (
        ("torch_native", "float32"),
        ("torch_native", "bfloat16"),
        ("ascend", "bfloat16"),
    ):
        driver = StepDriver(tmp_path, page_size=PAGE, dtype=dtype, attention_backend=name)
        steps = [
            driver.extend([(0, range(20)), (3, range(5, 38))]),
            driver.extend([(3, range(70, 75)), (1, [9])]),
            *(driver.decode([(0, token), (1, token + 1), (3, token + 2)]) for token in range(4)),
        ]
        logits.append(torch.cat([step.next_token_logits for step in steps]))
    assert operator.calls[-2:] == [("pages", 3)] * 2  # layers of the last step
    # Both round as often: as far from fp32.
    native, ascend = (float((bf16 - logits[0]).norm()) for bf16 in logits[1:])
    assert ascend < 2 * native


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": torch.float32}, "takes --dtype bfloat16 or float16 .* use torch_native"),
        ({"page_size": 1}, "--page-size of a multiple of 16 up to 512, not 1; 128"),
        ({"page_size": 528}, "not 528"),
        ({"head_dim": 24}, "does not take 6 heads of 24 elements over 2 KV heads"),
        ({"num_heads": 130}, "does not take 130 heads"),
    ],
)
def test_what_the_operator_does_not_take_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_attention_backend("ascend", config(**fields, device="npu:0"))


def test_it_is_chosen_by_name_on_an_npu_alone(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_attention_backend("npu") == "torch_native"
    with pytest.raises(ValueError, match="'ascend' does not run on 'cpu': use torch_native"):
        create_attention_backend("ascend", config())
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ValueError, match="--attention-backend ascend: torch_npu is not installed"):
        create_attention_backend("ascend", config(device="npu:0"))

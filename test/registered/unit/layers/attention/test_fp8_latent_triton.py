"""Kernels over latent rows and indexer keys in fp8: the results of torch's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.models.triton_device import round_as_a_gpu, triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

from rigs.models.latent_driver import latent_driver  # noqa: E402
from sglang.srt.layers.attention import dense_attention, dsa_backend  # noqa: E402
from sglang.srt.layers.attention import latent_triton_backend as backend  # noqa: E402
from sglang.srt.layers.forward_batch_info import ForwardBatch, IndexQuery  # noqa: E402
from sglang.srt.layers.triton_ops.attention import indexer_scores  # noqa: E402
from sglang.srt.layers.triton_ops.attention.indexer_scores import index_scores  # noqa: E402
from sglang.srt.layers.triton_ops.attention.latent_rows import latent_attention  # noqa: E402
from sglang.srt.layers.triton_ops.attention.masked_attention import (  # noqa: E402
    masked_attention,
)
from sglang.srt.mem_cache.device import fp8_rows_triton  # noqa: E402
from sglang.srt.mem_cache.device.fp8_rows import pack, read_rows  # noqa: E402

SLOTS: Final = 2000
LENS: Final = [300, 7, 100, 64, 33]
ROWS: Final = [0, 1, 2, 2, 0]
SIZES: Final = [(512, 64), (128, 0), (384, 8), (32, 8), (24, 0)]


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        round_as_a_gpu(monkeypatch)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lists() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three lists of scattered slots, and which of them, and how much, each of five tokens sees."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[:900]
    table = slots.int().view(3, 300).to(DEVICE)
    return table, torch.tensor(ROWS, device=DEVICE), torch.tensor(LENS, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("elements", "rest"), SIZES)
def test_rows_are_stored_and_gathered_bit_for_bit(
    elements: int, rest: int, dtype: torch.dtype
) -> None:
    rows = values(9, 1, elements + rest) * torch.logspace(-5, 4, 9).view(9, 1, 1)
    rows[3] = 0
    rows = rows.to(dtype)
    width = pack(rows[:, 0], elements).shape[1]
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:9]
    want = torch.zeros(20, 1, width, dtype=torch.uint8)
    want[slots, 0] = pack(rows[:, 0], elements)
    # Two layers: the second begins inside the memory of both.
    buffer = torch.zeros(2, 20, 1, width, dtype=torch.uint8, device=DEVICE)[1]
    fp8_rows_triton.store_rows(buffer, slots.to(DEVICE), rows.to(DEVICE), elements)
    assert torch.equal(buffer.cpu(), want)
    for out in (torch.float32, HALF):
        got = fp8_rows_triton.gather_rows(buffer, slots.to(DEVICE), elements, out)
        assert torch.equal(got.cpu(), read_rows(want[slots], elements, out))
    none = slots[:0].to(DEVICE)
    fp8_rows_triton.store_rows(buffer, none, rows[:0].to(DEVICE), elements)
    empty = fp8_rows_triton.gather_rows(buffer, none, elements, out)
    assert empty.shape == (0, 1, elements + rest)
    assert torch.equal(buffer.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 4, None])
@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(6, 48, 16), (20, 256, 8), (6, 384, 8), (128, 512, 64)]
)
def test_tokens_attend_to_their_lists(
    dtype: torch.dtype, splits: int | None, heads: int, rank: int, rope: int
) -> None:
    if heads == 128 and not ON_GPU:
        pytest.skip("minutes in the interpreter")
    table, rows, lens = lists()
    stored = pack(values(SLOTS, rank + rope) * 3, rank)
    read = read_rows(stored, rank, torch.float32).to(DEVICE)
    pool = stored.unsqueeze(1).to(DEVICE)
    latent_q = values(heads, 5, rank, dtype=dtype, seed=1).transpose(0, 1).to(DEVICE)
    rope_q = values(5, heads, rope + 24, dtype=dtype, seed=2).to(DEVICE)[..., 24:]
    scale = (rank + rope) ** -0.5
    for most in (0, 50):
        got = latent_attention(
            latent_q, rope_q, pool, table, rows, lens, scale, most=most, splits=splits
        )
        for i, (row, length) in enumerate(zip(ROWS, LENS, strict=True)):
            seen = read[table[row, : min(length, most or length)].long()]
            q = torch.cat((latent_q[i], rope_q[i]), dim=-1).float()
            want = torch.softmax(q @ seen.T * scale, dim=-1) @ seen[:, :rank]
            rtol = 1e-4 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(got[i].float(), want, rtol=rtol, atol=3 * rtol)


@pytest.mark.parametrize("many", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (16, 32), (64, 128)])
def test_scores_are_those_of_rounded_queries_and_keys(
    heads: int, dim: int, dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens with one list read its keys as stored, or in a copy."""
    monkeypatch.setattr(indexer_scores, "_MANY_TOKENS", many)
    table, rows, lens = lists()
    stored = pack(values(SLOTS, dim), dim)
    keys, q = stored.to(DEVICE), values(5, heads, dim, seed=1, dtype=dtype)
    weights = values(5, heads, seed=2)
    args = q.to(DEVICE), weights.to(DEVICE), keys, table
    scores = index_scores(*args, rows, lens, max(LENS))
    together = index_scores(*args, torch.zeros_like(rows), lens, max(LENS), one_list=True)
    for i, (row, length) in enumerate(zip(ROWS, LENS, strict=True)):
        query = IndexQuery(q[i : i + 1], weights[i : i + 1], 1)
        for got, its_row in ((scores, row), (together, 0)):
            context = stored[table[its_row, :length].long().cpu()]
            (want,) = dsa_backend.index_scores(query, context, positions=torch.tensor([length - 1]))
            # Tensor cores add products of fp8 with 14 bits.
            torch.testing.assert_close(got[i, :length].cpu(), want, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32"])
def test_logits_are_those_of_torch(
    tmp_path: Path, family: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one request beside a short one, then decode steps. A sum in another order now and
    then moves a number to the next in fp8."""
    if is_long:
        _let_few_tokens_be_many(monkeypatch)
    _save_dense(tmp_path, family)
    _check_logits(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32"])
def test_cached_tokens_that_are_computed_again_are_read_from_their_pages(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step stores those of both requests in the padding slot."""
    _let_few_tokens_be_many(monkeypatch)
    _save_dense(tmp_path, family)
    prompts, cached = [prompt(50, 1), prompt(60, 2)], [16, 32]
    cold = StepDriver(tmp_path, page_size=16, device="cpu", kv_cache_dtype="fp8_e4m3")
    want = cold.extend(list(enumerate(prompts))).next_token_logits

    def store_as_padding(batch: ForwardBatch) -> None:
        batch.out_cache_loc[[0, len(prompts[0]) - cached[0] + 1]] = 0

    driver = latent_driver(tmp_path, DEVICE, "fp8_e4m3")
    driver.extend([(row, prompts[row][:count]) for row, count in enumerate(cached)])
    driver.lens[:2] = [count - 1 for count in cached]
    work = [(row, prompts[row][count - 1 :]) for row, count in enumerate(cached)]
    got = driver.extend(work, before=store_as_padding).next_token_logits
    torch.testing.assert_close(got.cpu(), want, rtol=0.02, atol=0.02)


def _let_few_tokens_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 new tokens of a request project rows up, in several parts."""
    monkeypatch.setattr(backend, "SHORT_TOKENS", 20)
    monkeypatch.setattr(backend, "TOKENS_AT_ONCE", 8)
    monkeypatch.setattr(dense_attention, "HEADS_AT_ONCE", 4)
    monkeypatch.setattr(dense_attention, "UNIT", 8)
    monkeypatch.setattr(dense_attention, "PIECE_UNITS", 2)


def _save_dense(path: Path, family: str) -> None:
    """A model of dense layers, since experts that are chosen otherwise would say other words."""
    dense: dict[str, Any] = {"first_k_dense_replace": 2}
    if family == "deepseek_v32":
        dense["mlp_layer_types"] = ["dense", "dense"]
    save_tiny_checkpoint(path, family, **dense)


def test_logits_under_a_mask_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens that choose attend under a mask, later ones to rows."""
    monkeypatch.setattr(backend, "SHORT_TOKENS", 20)
    monkeypatch.setattr(backend, "TOKENS_AT_ONCE", 8)
    monkeypatch.setattr(backend, "HEADS_AT_ONCE", 4)
    monkeypatch.setattr(backend, "MASKED_CONTEXT", 72)
    monkeypatch.setattr(backend, "FEW_HEADS", 0)
    monkeypatch.setattr(backend, "MASKED_TOKENS", 5)
    masked = []

    def attend(q: torch.Tensor, *args: Any) -> None:
        masked.append(len(q))
        masked_attention(q, *args)

    monkeypatch.setattr(backend, "masked_attention", attend)
    dense: dict[str, Any] = {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", "dense"]}
    sizes: dict[str, Any] = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}
    save_tiny_checkpoint(tmp_path, "deepseek_v32", **dense, **sizes)
    _check_logits(tmp_path)
    assert {5, 35} <= set(masked)


def _check_logits(path: Path) -> None:
    long, short = prompt(90, 1), prompt(21, 2)
    both = []
    for driver in (
        latent_driver(path, DEVICE, "fp8_e4m3"),
        StepDriver(path, page_size=16, device="cpu", kv_cache_dtype="fp8_e4m3"),
    ):
        got = [driver.extend([(0, short[:17]), (1, long[:37])]).next_token_logits.clone()]
        got.append(driver.extend([(1, long[37:88])]).next_token_logits.clone())
        for step in range(2):
            pairs = [(1, long[88 + step]), (0, short[17 + step])]
            got.append(driver.decode(pairs).next_token_logits.clone())
        both.append(torch.cat(got).cpu())
    torch.testing.assert_close(*both, rtol=0.02, atol=0.02)

"""Latent attention by Triton: its kernels against definitions, its backend against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.model_oracle import prompt, reference
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

from rigs.models.latent_driver import latent_driver  # noqa: E402
from sglang.srt.layers.attention import (  # noqa: E402
    dense_attention,
    dsa_backend,
)
from sglang.srt.layers.attention import latent_triton_backend as backend  # noqa: E402
from sglang.srt.layers.triton_ops.attention import indexer_topk  # noqa: E402
from sglang.srt.layers.triton_ops.attention.indexer_scores import index_scores  # noqa: E402
from sglang.srt.layers.triton_ops.attention.indexer_topk import choose_slots  # noqa: E402
from sglang.srt.layers.triton_ops.attention.latent_rows import latent_attention  # noqa: E402
from sglang.srt.layers.triton_ops.attention.masked_attention import (  # noqa: E402
    mask_of,
    masked_attention,
)

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
LENS = [300, 7, 100, 64, 33]
ROWS = [0, 1, 2, 2, 0]


def lists() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three lists of scattered slots, and which of them, and how much, each of five tokens sees."""
    slots = torch.randperm(2000, generator=torch.Generator().manual_seed(3))[:900]
    table = slots.int().view(3, 300).to(DEVICE)
    return table, torch.tensor(ROWS, device=DEVICE), torch.tensor(LENS, device=DEVICE)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 4, None])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(6, 48, 16), (80, 64, 8), (128, 512, 64)])
def test_tokens_attend_to_their_lists(
    dtype: torch.dtype, splits: int | None, heads: int, rank: int, rope: int
) -> None:
    if heads == 128 and not ON_GPU:
        pytest.skip("minutes in the interpreter")
    table, rows, lens = lists()
    pool = values(2000, 1, rank + rope, dtype=dtype)
    # The model's strides: products of heads are transposed, and a part of a query is a view.
    latent_q = values(heads, 5, rank, dtype=dtype, seed=1).transpose(0, 1)
    rope_q = values(5, heads, rope + 24, dtype=dtype, seed=2)[..., 24:]
    scale = (rank + rope) ** -0.5
    for most in (0, 50):
        got = latent_attention(
            latent_q, rope_q, pool, table, rows, lens, scale, most=most, splits=splits
        )
        for i, (row, length) in enumerate(zip(ROWS, LENS, strict=True)):
            seen = pool[table[row, : min(length, most or length)].long(), 0].float()
            q = torch.cat((latent_q[i], rope_q[i]), dim=-1).float()
            want = torch.softmax(q @ seen.T * scale, dim=-1) @ seen[:, :rank]
            rtol = 1e-4 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(got[i].float(), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (16, 32), (64, 128)])
def test_scores_and_choice_equal_the_definition(heads: int, dim: int) -> None:
    table, rows, lens = lists()
    keys, q = values(2000, dim), values(5, heads, dim, seed=1)
    weights = values(5, heads, seed=2)
    scores = index_scores(q, weights, keys, table, rows, lens, max(LENS))
    together = index_scores(
        q, weights, keys, table, torch.zeros_like(rows), lens, max(LENS), one_list=True
    )
    chosen = choose_slots(scores, table, rows, lens, 64)
    for i, (row, length) in enumerate(zip(ROWS, LENS, strict=True)):
        for got, its_row in ((scores, row), (together, 0)):
            its_keys = keys[table[its_row, :length].long()]
            want = (torch.relu(q[i] @ its_keys.T) * weights[i, :, None]).sum(dim=0)
            torch.testing.assert_close(got[i, :length], want, rtol=1e-3, atol=1e-3)
        slots = table[row, :length]
        if length > 64:
            slots = slots[dsa_backend.choose_tokens(scores[i : i + 1, :length], 64)[0]]
        assert torch.equal(chosen[i, : len(slots)], slots)
        assert (chosen[i, len(slots) :] == -1).all()


@pytest.mark.parametrize("longest", [1000, 9000, 20000])
def test_of_equal_tokens_the_first_are_chosen(longest: int) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (5, longest), generator=generator).float()
    scores[1] *= -0.0  # 0 and -0 are equal.
    scores[2] = torch.randn(longest, generator=generator) * 1e-38
    scores[4] = torch.arange(longest)  # All of the best are in the last block.
    scores = scores.to(DEVICE)
    table = torch.arange(longest, dtype=torch.int32, device=DEVICE).view(1, -1)
    lens = torch.tensor([longest, longest - 1, 500, 201, longest - 3], device=DEVICE)
    chosen = choose_slots(scores, table, torch.zeros_like(lens), lens, 200)
    for i, length in enumerate(lens.tolist()):
        want = dsa_backend.choose_tokens(scores[i : i + 1, :length], 200)[0]
        assert torch.equal(chosen[i].long(), want)


def unusual_scores(length: int) -> dict[str, torch.Tensor]:
    """fp32 `[length]` each, on the CPU."""
    generator = torch.Generator().manual_seed(7)
    places = torch.arange(length)
    plain = torch.randn(length, generator=generator)
    is_zero = torch.rand(length, generator=generator) < 0.6
    nan = torch.tensor(float("nan"))
    # The kernel compares the best of the tokens that are 128 apart.
    is_together = places % 128 < 40
    return {
        "plain": plain,
        "many zeros": plain.masked_fill(is_zero, 0.0),
        "zeros at the threshold": torch.where(is_zero | (places % 20 > 0), 0.0, plain),
        "zeros of both signs": torch.where(places % 17 == 0, 1.0, plain.sign() * 0.0),
        "all equal": torch.full((length,), -3.7),
        "few values": torch.randint(0, 3, (length,), generator=generator).float(),
        "the best together": torch.where(is_together, 50 + plain, plain),
        "equal ones together": torch.where(is_together, 50 + plain.sign(), plain),
        "infinite": torch.where(places % 9 == 0, torch.inf, torch.where(is_zero, -torch.inf, 1.0)),
        "not numbers": torch.where(places % 9 == 0, nan, torch.where(is_zero, -nan, plain)),
        "the lowest of all": torch.full((length,), -1, dtype=torch.int32).view(torch.float32),
    }


def best_by_order_of_bits(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Ascending positions of the best scores. NaN lie beyond infinity on both sides."""
    bits = torch.where(scores == 0.0, 0.0, scores).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys.sort(descending=True, stable=True).indices[:topk].sort().values


@pytest.mark.parametrize("few_tokens", [0, 1000])
def test_unusual_scores_are_ranked(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to launch; rows that are as long as a block, and one token shorter or longer."""
    monkeypatch.setattr(indexer_topk, "_FEW_TOKENS", few_tokens)
    longest, topk = 516, 50
    kinds = unusual_scores(longest)
    lengths = [longest, 512, 129, 128, 51, 50]
    scores = torch.stack(list(kinds.values())).repeat(len(lengths), 1)
    lens = torch.tensor(lengths).repeat_interleave(len(kinds))
    slots = torch.randperm(longest, generator=torch.Generator().manual_seed(8)).int()
    chosen = choose_slots(
        scores.to(DEVICE),
        slots.view(1, -1).to(DEVICE),
        torch.zeros_like(lens).to(DEVICE),
        lens.to(DEVICE),
        topk,
    )
    for nth, (length, found) in enumerate(zip(lens.tolist(), chosen.cpu(), strict=True)):
        want = best_by_order_of_bits(scores[nth, :length], topk)
        assert torch.equal(found, slots[want]), (length, list(kinds)[nth % len(kinds)])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("n", "prefix"), [(70, 0), (64, 64), (5, 131)])
def test_masked_tokens_attend_to_chosen_ones(dtype: torch.dtype, n: int, prefix: int) -> None:
    """Some heads of a query, written into some heads of the output."""
    heads, key_dim, rope, value_dim, context = 3, 32, 16, 64, prefix + n
    q = values(n, heads + 2, key_dim + rope, dtype=dtype)[:, 1 : 1 + heads]
    projected = values(context, heads, key_dim + value_dim, dtype=dtype, seed=1)
    rows = values(context, 48 + rope, dtype=dtype, seed=2)
    generator = torch.Generator().manual_seed(3)
    # A token that attends to itself alone, and tokens whose chosen ones are in a few blocks.
    lists = [torch.randperm(prefix + i + 1, generator=generator)[:20] for i in range(n)]
    chosen = torch.stack([torch.cat((found, found[:1].expand(20 - len(found)))) for found in lists])
    mask = mask_of(chosen.to(DEVICE), context)
    out = torch.full((n, heads + 1, value_dim), 7.0, dtype=dtype, device=DEVICE)
    masked_attention(q, projected, rows, mask, prefix, 0.3, out[:, :heads])
    shared = rows[:, None, 48:].expand(-1, heads, -1)
    keys = torch.cat((projected[..., :key_dim], shared), dim=-1).float()
    scores = torch.einsum("nhd,chd->hnc", q.float(), keys) * 0.3
    is_seen = torch.zeros(n, context, dtype=torch.bool).scatter_(1, chosen, True).to(DEVICE)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    want = torch.einsum("hnc,chd->nhd", scores.softmax(-1), projected[..., key_dim:].float())
    rtol = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out[:, :heads].float(), want, rtol=rtol, atol=rtol)
    assert (out[:, heads] == 7.0).all()


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one request beside a short one, then decode steps."""
    if is_long:
        monkeypatch.setattr(backend, "SHORT_TOKENS", 20)
        monkeypatch.setattr(backend, "TOKENS_AT_ONCE", 8)
        monkeypatch.setattr(dense_attention, "HEADS_AT_ONCE", 4)
        monkeypatch.setattr(dense_attention, "UNIT", 8)
        monkeypatch.setattr(dense_attention, "PIECE_UNITS", 2)
    _check_logits(tmp_path, save_tiny_checkpoint(tmp_path, family))


def test_logits_under_a_mask_equal_transformers(
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
    hf = save_tiny_checkpoint(
        tmp_path, "deepseek_v32", qk_rope_head_dim=16, head_dim=16, v_head_dim=16
    )
    _check_logits(tmp_path, hf)
    # Chunks of tokens 32 to 36, and 37 to 71; the heads in two parts.
    assert {5, 35} <= set(masked)


def _check_logits(path: Path, hf: Any) -> None:
    driver = latent_driver(path, DEVICE)
    long, short = prompt(90, 1), prompt(21, 2)
    want_long, want_short = reference(hf, long), reference(hf, short)
    got = [driver.extend([(0, short[:17]), (1, long[:37])]).next_token_logits.clone()]
    want = [want_short[16], want_long[36]]
    got.append(driver.extend([(1, long[37:88])]).next_token_logits.clone())
    want.append(want_long[87])
    for step in range(2):
        pairs = [(1, long[88 + step]), (0, short[17 + step])]
        got.append(driver.decode(pairs).next_token_logits.clone())
        want += [want_long[88 + step], want_short[17 + step]]
    torch.testing.assert_close(torch.cat(got).cpu(), torch.stack(want), rtol=1e-3, atol=1e-3)

"""DSA over groups of tokens by Triton: kernels against definitions, the model against torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rigs.layers.quick_interpreter import quicken_interpreter
from rigs.models.kernel_layers import DEVICE, HALF, randn
from rigs.models.model_oracle import prompt, reference
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.layers.attention import dense_attention, dsa_backend
from sglang.srt.layers.attention import latent_triton_backend as backend
from sglang.srt.layers.linear_attention import delta_layer
from sglang.srt.layers.triton_ops.attention import latent_rows
from sglang.srt.layers.triton_ops.attention.indexer_scores import index_scores
from sglang.srt.layers.triton_ops.attention.indexer_topk import choose_slots
from sglang.srt.layers.triton_ops.attention.latent_rows import OpenGroups, latent_attention
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

from rigs.layers.pooled_driver import pooled_driver  # noqa: E402

if DEVICE == "cpu":
    quicken_interpreter()

RATIO, TOPK = 16, 64
LENS = [15, 16, 17, 63, 64, 79, 80, 81, 127, 128, 129, 255, 256]


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two lists of the slots of scattered groups; tokens of different lengths see them in turn."""
    groups = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:32] + 1
    slots = groups.unsqueeze(1) * RATIO + torch.arange(RATIO)
    rows = torch.arange(len(LENS)) % 2
    table = slots.int().view(2, 16 * RATIO).to(DEVICE)
    return table, rows.to(DEVICE), torch.tensor(LENS, device=DEVICE)


@pytest.mark.parametrize("one_list", [False, True])
def test_groups_are_scored_and_chosen(one_list: bool) -> None:
    table, rows, lens = tables()
    rows = torch.zeros_like(rows) if one_list else rows
    keys = torch.full((61, 24), torch.nan, device=DEVICE)
    owned = table[:, ::RATIO].flatten().long() // RATIO
    keys[owned] = randn(len(owned), 24, seed=1)
    q, weights = randn(len(LENS), 8, 24, seed=2), randn(len(LENS), 8, seed=3)
    scores = index_scores(q, weights, keys, table, rows, lens, 20, one_list=one_list, stride=RATIO)
    chosen = choose_slots(scores, table, rows, lens, TOPK // RATIO, stride=RATIO)
    for i, length in enumerate(LENS):
        items = table[rows[i], : length // RATIO * RATIO : RATIO].long() // RATIO
        want = (torch.relu(q[i] @ keys[items].T) * weights[i, :, None]).sum(dim=0)
        torch.testing.assert_close(scores[i, : len(items)], want, rtol=1e-4, atol=1e-4)
        if len(items) > TOPK // RATIO:
            best = dsa_backend.choose_tokens(scores[i : i + 1, : len(items)], TOPK // RATIO)
            items = items[best[0]]
        assert torch.equal(chosen[i, : len(items)].long(), items)
        assert (chosen[i, len(items) :] == -1).all()


@pytest.mark.parametrize("rope", [0, 16])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_tokens_attend_to_chosen_groups_and_their_open_one(
    dtype: torch.dtype, splits: int, rope: int
) -> None:
    """Rows that no list has are NaN, but for the padding page."""
    table, rows, lens = tables()
    heads, rank = 5, 32
    pool = torch.full((61 * RATIO, 1, rank + rope), torch.nan, dtype=dtype, device=DEVICE)
    pool[:RATIO] = 7.0
    owned = table.flatten().long()
    pool[owned] = randn(len(owned), 1, rank + rope, seed=4, dtype=dtype)
    q = randn(len(LENS), heads, rank + rope, seed=5, dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    chosen = torch.full((len(LENS), TOPK // RATIO), -1, dtype=torch.int32)
    for i, length in enumerate(LENS):
        count = min(length // RATIO, TOPK // RATIO)
        best = torch.randperm(length // RATIO, generator=generator)[:count].sort().values
        chosen[i, :count] = table[rows[i], best.to(DEVICE) * RATIO].cpu() // RATIO
    chosen = chosen.to(DEVICE)
    own = torch.arange(len(LENS), device=DEVICE)
    got = latent_attention(
        q[..., :rank], q[..., rank:], pool, chosen, own, lens, 0.2,
        most=TOPK, groups=OpenGroups(RATIO, table, rows), splits=splits,
    )  # fmt: skip
    for i, length in enumerate(LENS):
        items = chosen[i][chosen[i] >= 0].long()
        slots = (items[:, None] * RATIO + torch.arange(RATIO, device=DEVICE)).flatten()
        tail = table[rows[i], length // RATIO * RATIO : length].long()
        seen = pool[torch.cat([slots, tail]), 0].float()
        want = torch.softmax(q[i].float() @ seen.T * 0.2, dim=-1) @ seen[:, :rank]
        rtol = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got[i].float(), want, rtol=rtol, atol=rtol)


@pytest.mark.skipif(DEVICE == "cuda", reason="`test_glm5_next_cuda.py` runs the whole model")
@pytest.mark.parametrize("way", ["short", "long", "replayed", "rule in torch"])
def test_the_model_by_kernels_equals_transformers(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end at the edges of groups and pages beside another request, then decode steps;
    afterwards the pools have what they have in torch. Kernels of recurrent layers do not take
    heads of this size in long prefills."""
    monkeypatch.setattr(latent_rows, "PROGRAMS", 4)
    if way == "rule in torch":
        monkeypatch.setattr(delta_layer, "SHORT", 0)
    if way == "long":
        monkeypatch.setattr(backend, "SHORT_TOKENS", 20)
        monkeypatch.setattr(backend, "TOKENS_AT_ONCE", 32)
        monkeypatch.setattr(dense_attention, "UNIT", 8)
        monkeypatch.setattr(dense_attention, "PIECE_UNITS", 2)
    hf = save_tiny_checkpoint(tmp_path, "glm5_next", max_position_embeddings=512)
    edges = [15, 16, 17, 63, 64, 95, 96, 97] if way == "long" else [7, 15, 16, 17, 31, 48, 49, 50]
    tokens, other = prompt(edges[-1] + 3, 1), prompt(40, 2)
    want, want_other = reference(hf, tokens), reference(hf, other)
    replays = monkeypatch if way == "replayed" else None
    by_kernels = pooled_driver(tmp_path, by_kernels=True, replays=replays)
    drivers = by_kernels, pooled_driver(tmp_path, by_kernels=False)
    for nth, (begin, end) in enumerate(itertools.pairwise([0, *edges])):
        work = [(1, tokens[begin:end])]
        wanted = [want[end - 1]]
        if nth < 4:
            work.insert(0, (0, other[9 * nth : 9 * nth + 9]))
            wanted.insert(0, want_other[9 * nth + 8])
        for driver in drivers:
            got = driver.extend(work).next_token_logits
            torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-3, atol=1e-3)
    for step in range(2):
        work_of_step = [(1, tokens[edges[-1] + step]), (0, other[36 + step])]
        wanted = [want[edges[-1] + step], want_other[36 + step]]
        for driver in drivers:
            got = driver.decode(work_of_step).next_token_logits
            torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-3, atol=1e-3)
    kept = (
        zip(*(driver.runner.pools[name].parts[0] for driver in drivers), strict=True)
        for name in (PoolName.KV, PoolName.INDEXER, PoolName.OPEN_GROUP)
    )
    for got, in_torch in itertools.chain.from_iterable(kept):
        # The first page, or the last request, is padding.
        own = (
            slice(None, -1) if got.dim() == 3 and got.shape[1] > 1 else slice(len(got) // 65, None)
        )
        torch.testing.assert_close(got[own], in_torch[own], rtol=1e-3, atol=1e-3, equal_nan=True)

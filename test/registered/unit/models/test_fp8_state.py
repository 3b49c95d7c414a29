"""DeepSeek models whose latent rows and indexer keys are in fp8: the distance from other state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.models.model_oracle import logits_of_batches, prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.mla.latent_attention import hadamard
from sglang.srt.mem_cache.device.fp8_rows import pack, read_rows
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

FAMILIES: Final = ("deepseek_v2", "deepseek_v32", "glm_moe_dsa")
SPARSE: Final = FAMILIES[1:]
FP8: Final = "fp8_e4m3"
PAGE: Final = 16
ROUNDING: Final = 2.0**-4
"""Largest relative error of a number in e4m3: half of its last bit. The logits of a step err by
less than two of it, in the median; half of that was measured."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of dense layers, since experts that are chosen otherwise would say other words."""
    root = tmp_path_factory.mktemp("latent")
    for family in FAMILIES:
        dense: dict[str, Any] = {"first_k_dense_replace": 2, "eos_token_id": None}
        if family in SPARSE:
            # A power of 2, so that keys are multiplied by a Hadamard matrix.
            dense |= {"mlp_layer_types": ["dense", "dense"], "index_head_dim": 32}
        save_tiny_checkpoint(root / family, family, **dense)
        if family in SPARSE:
            dense["index_topk"] = 500
        save_tiny_checkpoint(root / f"{family}-all", family, **dense)
    return {path.name: path for path in root.iterdir()}


def driver_of(path: Path, dtype: str, **args: Any) -> StepDriver:
    return StepDriver(path, page_size=PAGE, kv_cache_dtype=dtype, **args)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_err_as_rounded_rows_let_expect(models: dict[str, Path], family: str) -> None:
    """Every token is attended to: a choice of others would be no matter of rounding."""
    path = models[f"{family}-all"]
    want, half, got = (
        logits_of_batches(driver_of(path, dtype)) for dtype in ("float32", "bfloat16", FP8)
    )
    error, of_half = (
        ((one - want).norm(dim=-1) / want.norm(dim=-1)).median() for one in (got, half)
    )
    assert of_half < error < 2 * ROUNDING


@pytest.mark.parametrize("family", SPARSE)
def test_nearly_the_same_tokens_are_chosen(
    models: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer, where rows are those of the same hidden states."""
    chosen: list[torch.Tensor] = []
    choose_tokens = dsa_backend.choose_tokens

    def recording(scores: torch.Tensor, topk: int) -> torch.Tensor:
        chosen.append(choose_tokens(scores, topk))
        return chosen[-1]

    monkeypatch.setattr(dsa_backend, "choose_tokens", recording)
    first_layers = []
    for dtype in ("bfloat16", FP8):
        chosen.clear()
        driver_of(models[family], dtype).extend([(0, prompt(96, 3))])
        first_layers.append(chosen[0])
    both = [
        set(one.tolist()) & set(other.tolist()) for one, other in zip(*first_layers, strict=True)
    ]
    share = sum(map(len, both)) / first_layers[0].numel()
    assert first_layers[0].shape == (64, 32) and 0.9 < share < 1


@pytest.mark.parametrize("outliers", [1, 10, 100])
def test_large_elements_of_indexer_keys_make_no_large_errors(outliers: int) -> None:
    """The error of a product in fp8, relative to the vectors' lengths: no more than of vectors
    whose elements are alike. Without the matrix it is 3.6 times as large."""
    matrix = hadamard(128, torch.float32, "cpu")
    assert matrix is not None and hadamard(24, torch.float32, "cpu") is None
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(128))
    assert matrix.abs().min() == matrix.abs().max()
    q, k = torch.randn(2, 2000, 128, generator=torch.Generator().manual_seed(0))
    q[:, :3] *= outliers
    k[:, :3] *= outliers
    exact, lengths = (q * k).sum(dim=1), q.norm(dim=1) * k.norm(dim=1)
    q, k = (read_rows(pack(x @ matrix, 128), 128, torch.float32) for x in (q, k))
    error = (((q * k).sum(dim=1) - exact) / lengths).square().mean().sqrt()
    assert error < 0.004


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_a_byte_for_each_element_and_the_scales(
    models: dict[str, Path], family: str
) -> None:
    row, key = 32 + 4 + 2 * 8, 32 + 4
    runner = driver_of(models[family], FP8).runner
    assert runner.kv_bytes_per_token() == 2 * (row + (key if family in SPARSE else 0))


@pytest.mark.parametrize("chunk", [1, 7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_tokens_are_read_rounded_however_a_prompt_is_cut(
    models: dict[str, Path], family: str, chunk: int
) -> None:
    """Only sums in another order differ, which now and then moves a number to the next in fp8."""
    tokens, logits = prompt(90, 4), []
    for size in (90, chunk):
        driver = driver_of(models[family], FP8)
        for begin in range(0, 90, size):
            step = driver.extend([(0, tokens[begin : begin + size])])
        logits.append(step.next_token_logits)
    torch.testing.assert_close(*logits, rtol=0.02, atol=0.02)

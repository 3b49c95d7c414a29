"""DeepSeek-V4's attention by Triton against plain torch: windows, rows, groups, snapshots."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

from rigs.layers.compressed_cases import CompressedLayers, Work  # noqa: E402
from sglang.srt.layers.attention.compressed_triton_backend import (  # noqa: E402
    CompressedTritonBackend,
)
from sglang.srt.layers.compressed.rotation import rotate_last  # noqa: E402
from sglang.srt.layers.rotary_embedding import Rotation  # noqa: E402
from sglang.srt.layers.triton_ops.attention import latent_rows  # noqa: E402
from sglang.srt.layers.triton_ops.compressed.rotated_norm import (  # noqa: E402
    normalise_latents,
    rotate_heads,
)

WINDOW, SPARSE = "sliding_attention", "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
PUBLISHED = {
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "sliding_window": 128,
    "index_topk": 40,
    "num_hidden_layers": 2,
    "layer_types": [SPARSE, HEAVY],
    "mlp_layer_types": ["moe"] * 2,
    "max_position_embeddings": 4096,
}
"""Ratios and window as published."""
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def split_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of few tokens have two parts: interpreted programs take long."""
    if not ON_GPU:
        monkeypatch.setattr(latent_rows, "PROGRAMS", 8)


def make(path: Path, **settings: object) -> CompressedLayers:
    if not ON_GPU:
        from rigs.layers.quick_interpreter import quicken_interpreter

        quicken_interpreter()
    return CompressedLayers(path, CompressedTritonBackend, DEVICE, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_and_rotations_equal_torch(dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(4)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=numbers).to(DEVICE, dtype)

    cos, sin, eps = randn(5, 1, 4), randn(5, 1, 4), 1e-3
    rotation = Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
    wide = randn(5, 7, 24)
    heads = wide[:, :3]
    normed = F.rms_norm(heads, (24,), None, eps)
    close: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype is HALF else {"rtol": 1e-5, "atol": 1e-5}
    )
    for got, want in (
        (rotate_heads(heads, rotation, eps), rotate_last(normed, rotation)),
        (rotate_heads(heads, rotation), rotate_last(heads, rotation)),
    ):
        torch.testing.assert_close(got, want, **close)
    x, weights = randn(5, 40), (randn(16).float(), randn(24).float())
    latent, key = normalise_latents(x, weights, rotation, eps)
    parts = torch.split(x.float(), [16, 24], dim=1)
    wants = [
        F.rms_norm(part, weight.shape, weight, eps).to(dtype)
        for part, weight in zip(parts, weights, strict=True)
    ]
    torch.testing.assert_close(latent, wants[0], **close)
    torch.testing.assert_close(key, rotate_last(wants[1], rotation), **close)


def test_chunks_and_decode_steps_equal_torch(tmp_path: Path) -> None:
    """Contexts shorter than a group, than the window, and longer; requests of unlike lengths."""
    layers = make(tmp_path)
    assert layers.extend([Work(1, 3), Work(2, 1), Work(3, 37)]) < TOLERANCE
    for _ in range(2):
        assert layers.decode([2, 1, 3]) < TOLERANCE
    assert layers.extend([Work(3, 1), Work(4, 12), Work(1, 27), Work(2, 5)]) < TOLERANCE
    for _ in range(5):
        assert layers.decode([1, 4, 3]) < TOLERANCE
    assert layers.extend([Work(2, 3), Work(4, 2)], last_only=True) < TOLERANCE
    layers.check_pools(TOLERANCE)


@pytest.mark.parametrize("length", [3, 4, 127, 128, 129, 255, 256, 511])
def test_edges_of_groups_and_of_the_window_equal_torch(tmp_path: Path, length: int) -> None:
    """A prompt at once and in chunks that begin within groups, then two words."""
    layers = make(tmp_path, page_size=128, length=640, **PUBLISHED)
    assert layers.extend([Work(1, length)], last_only=True) < TOLERANCE
    cuts = sorted({0, *(cut for cut in (1, 127, 130, 300) if cut < length), length})
    for begin, end in itertools.pairwise(cuts):
        assert layers.extend([Work(2, end - begin)], last_only=True) < TOLERANCE
    for _ in range(2):
        assert layers.decode([1, 2]) < TOLERANCE
    layers.check_pools(TOLERANCE)


def test_the_last_token_before_a_snapshot_may_be_computed_again(tmp_path: Path) -> None:
    """It ends groups whose other tokens are gone: it reads the row that is there."""
    layers = make(tmp_path)
    assert layers.extend([Work(1, 37, track=(6, 32)), Work(3, 9)]) < TOLERANCE
    assert layers.repeat(2, 6) < TOLERANCE
    for _ in range(5):
        assert layers.decode([3, 2]) < TOLERANCE
    layers.check_pools(TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_torch(tmp_path: Path, seed: int) -> None:
    """Requests that take snapshots, and begin anew from those of others."""
    overrides = [
        {},
        {"index_topk": 1, "sliding_window": 1, "compress_rates": {SPARSE: 2, HEAVY: 8}},
        {"layer_types": [WINDOW, HEAVY, SPARSE, HEAVY], "sliding_window": 33},
    ][seed]
    layers = make(tmp_path, **overrides)
    assert layers.walk(seed, 40 if ON_GPU else 9) < TOLERANCE
    layers.check_pools(TOLERANCE)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's bf16 is no real one")
def test_long_prompts_in_bf16_err_little(tmp_path: Path) -> None:
    """The launch of half precision, several requests, long and short ones. Rounding may change a
    choice among rows of nearly equal scores."""
    settings = {**PUBLISHED, "head_dim": 512, "partial_rotary_factor": 1 / 8, "index_head_dim": 128}
    layers = make(
        tmp_path, page_size=128, length=2048, dtype=torch.bfloat16, qk_rope_head_dim=64, **settings
    )
    assert layers.extend([Work(1, 1500), Work(2, 20), Work(3, 300)]) < 5e-2
    assert layers.extend([Work(3, 500), Work(2, 1)], last_only=True) < 5e-2
    for _ in range(5):
        assert layers.decode([2, 1, 3]) < 5e-2

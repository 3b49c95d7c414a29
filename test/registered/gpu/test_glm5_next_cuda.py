"""GLM-5.3-Flash on a GPU: kernels give what plain torch gives, and graphs what launches give."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch

from rigs.layers.pooled_driver import poison
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.attention import latent_triton_backend
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

EDGES: Final = [15, 16, 17, 127, 128, 129, 255, 256]
TILES: Final[dict[str, Any]] = {"linear_head_dim": 64, "linear_num_heads": 2}
"""Heads that the kernels of KDA for many tokens take."""
KEPT: Final = PoolName.KV, PoolName.INDEXER, PoolName.OPEN_GROUP


def driver_of(path: Path, device: str, **options: Any) -> StepDriver:
    return StepDriver(path, page_size=16, pool_tokens=8192, device=device, **options)


def steps_of(driver: StepDriver, chunk: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of prompts that end at the edges, and of steps in which all decode over the end of a
    group; then what the pools keep of them. `chunk`: most tokens of a prompt at once."""
    poison(driver)
    logits = []
    for row, length in enumerate(EDGES):
        tokens = prompt(length, row)
        size = length if chunk is None else chunk
        for begin in range(0, length, size):
            output = driver.extend([(row, tokens[begin : begin + size])])
        logits.append(output.next_token_logits.cpu().clone())
    for step in range(18):
        output = driver.decode([(row, 5 + step) for row in range(len(EDGES))])
        logits.append(output.next_token_logits.cpu().clone())
    pools = driver.runner.pools
    kept = [layer.float().cpu() for name in KEPT for part in pools[name].parts for layer in part]
    return torch.cat(logits), kept


def assert_same(
    got: tuple[torch.Tensor, list[torch.Tensor]],
    want: tuple[torch.Tensor, list[torch.Tensor]],
    bound: float,
) -> None:
    assert (got[0] - want[0]).norm() < bound * want[0].norm()
    for one, other in zip(got[1], want[1], strict=True):
        # The last request is padding, or the first of 513 pages. The rest may be NaN in both.
        own = slice(None, -1) if len(other) == 17 else slice(len(other) // 513, None)
        is_kept = ~other[own].isnan()
        assert torch.equal(is_kept, ~one[own].isnan())
        kept = other[own][is_kept]
        assert (one[own][is_kept] - kept).norm() <= bound * kept.norm()


@pytest.mark.parametrize(
    ("shape", "backend", "chunk"),
    [
        *(({}, "triton", chunk) for chunk in (None, 7, 16, 100)),
        *((TILES, "triton", chunk) for chunk in (None, 100)),
        ({}, "torch_native", 7),
    ],
)
def test_logits_and_pools_equal_those_of_a_cpu(
    tmp_path: Path, shape: dict[str, Any], backend: str, chunk: int | None
) -> None:
    save_tiny_checkpoint(tmp_path, "glm5_next", max_position_embeddings=1024, **shape)
    want = steps_of(driver_of(tmp_path, "cpu"), chunk)
    got = steps_of(driver_of(tmp_path, "cuda", attention_backend=backend), chunk)
    assert_same(got, want, 1e-3)


@pytest.mark.parametrize(("chunk", "dtype"), [(7, "float32"), (None, "bfloat16")])
def test_graphs_give_what_launches_give(tmp_path: Path, chunk: int | None, dtype: str) -> None:
    """Eight requests are a captured size, so decode steps have no padding; short prefills do."""
    save_tiny_checkpoint(tmp_path, "glm5_next", max_position_embeddings=1024)
    drivers = [
        driver_of(tmp_path, "cuda", dtype=dtype, disable_cuda_graph=off) for off in (False, True)
    ]
    assert len(drivers[0].runner._graphs) == 2 and not drivers[1].runner._graphs
    found = [steps_of(driver, chunk) for driver in drivers]
    assert_same(found[0], found[1], 1e-4 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("chunk", [None, 400])
def test_long_prefills_equal_those_of_a_cpu(tmp_path: Path, chunk: int | None) -> None:
    """In chunks of KDA; the first tokens see all, later ones chosen groups."""
    save_tiny_checkpoint(tmp_path, "glm5_next", max_position_embeddings=2048, **TILES)
    tokens, found = prompt(900, 3), []
    for device in ("cpu", "cuda"):
        driver = driver_of(tmp_path, device)
        logits = []
        with mock.patch.object(latent_triton_backend, "SHORT_TOKENS", 64):
            for begin in range(0, 900, chunk or 900):
                output = driver.extend([(0, tokens[begin : begin + (chunk or 900)])])
                logits.append(output.next_token_logits.cpu().clone())
            logits += [driver.decode([(0, 7)]).next_token_logits.cpu().clone() for _ in range(20)]
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)

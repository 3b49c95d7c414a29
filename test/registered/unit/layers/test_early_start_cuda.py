"""Kernels that start early give the bits of kernels that wait for the end of the one before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()

from sglang.srt.layers.cuda_kernels import KERNELS, FusedKernels  # noqa: E402
from sglang.srt.layers.triton_ops import early_start  # noqa: E402

SIZE, INNER = 512, 1024
LAYERS, TURNS = (40, 50) if DEVICE == "cuda" else (2, 1)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    early_start._starts_early.cache_clear()
    yield
    early_start._starts_early.cache_clear()


def layers(seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Weights of norm, gated product and product back of each layer."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=numbers) * 0.05).to(DEVICE, torch.float32)

    return [(draw(SIZE) + 1.0, draw(2 * INNER, SIZE), draw(SIZE, INNER)) for _ in range(LAYERS)]


def run_chain(
    kernels: FusedKernels, weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The residual behind all layers, each of which reads what the kernel before has written."""
    x = torch.linspace(-1, 1, SIZE, device=DEVICE)[None, :].contiguous()
    residual = torch.zeros_like(x)
    inner = torch.empty((1, INNER), device=DEVICE)
    up_plan, down_plan = kernels.plan_gemv(2 * INNER, SIZE), kernels.plan_gemv(SIZE, INNER)
    assert up_plan is not None and down_plan is not None
    for norm, gate_up, down in weights:
        kernels.add_rms_norm_(x, residual, norm, 1e-6, False)
        kernels.gated_gemv(x, gate_up, inner, up_plan)
        kernels.gemv(inner, down, None, x, down_plan)
    return residual + x


def test_a_chain_of_early_kernels_has_the_same_bits() -> None:
    weights = layers(1)
    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        wanted = run_chain(KERNELS, weights)
    early_start._starts_early.cache_clear()
    for _ in range(TURNS):
        assert torch.equal(run_chain(KERNELS, weights), wanted)


def test_only_few_rows_start_early_unless_it_is_switched_off() -> None:
    few, many = torch.zeros(8, 1, device=DEVICE), torch.zeros(9, 1, device=DEVICE)
    is_able = device_runtime(few.device).starts_kernels_early
    assert early_start.early_start(few)["EARLY"] == is_able
    assert early_start.early_start(many) == {"EARLY": False}
    early_start._starts_early.cache_clear()
    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        assert early_start.early_start(few) == {"EARLY": False}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

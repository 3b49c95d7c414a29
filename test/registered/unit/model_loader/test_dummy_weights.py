"""Dummy weights: the same on every device, spread as they should be, without repetitions."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.model_loader.dummy_weights import dummy_tensor
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_cuda_ci(est_time=5, suite="base-b-test-1-gpu-large")


def make(
    name: str, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    return dummy_tensor(name, shape, seed, dtype=dtype, device=device)


def test_values_are_what_they_were() -> None:
    """Caches hold what these weights computed: to change them is to change their identity."""
    got = (make("a.weight", 2, 3) * (1 << 23)).tolist()
    assert got == [[-1941335.0, -4099268.0, -8250962.0], [641626.0, -2660793.0, 5293160.0]]


def test_scale_and_spread() -> None:
    matrix = make("w", 300, 4096)
    bound = (3 / 4096) ** 0.5
    assert matrix.abs().max() <= bound
    assert matrix.std().item() == pytest.approx(4096**-0.5, rel=0.01)
    assert matrix.mean().abs() < 0.01 * bound
    assert make("input_layernorm.weight", 4096).mean().item() == pytest.approx(1.0, abs=0.01)
    assert make("q_proj.bias", 4096).abs().max() <= 0.1


def test_seed_and_name_and_place_all_count() -> None:
    base = make("w", 64, 64)
    assert torch.equal(base, make("w", 64, 64))
    for other in (make("w", 64, 64, seed=4), make("v", 64, 64)):
        assert (base == other).float().mean() < 0.01
    assert len(set(base.view(-1).tolist())) > 4000


def test_chunks_are_not_one_another() -> None:
    """More than one chunk, the last of them odd: nothing is repeated, nothing left out."""
    flat = make("w", 3, 700_001).view(-1)
    chunk = 1 << 20
    assert (flat[: len(flat) - chunk] == flat[chunk:]).float().mean() < 1e-4
    assert len(set(flat.tolist())) > 0.9 * len(flat)
    assert flat[2 * chunk :].std().item() == pytest.approx(flat.std().item(), rel=0.05)


@pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_the_same_bytes(dtype: torch.dtype) -> None:
    for name, shape in (("w", (3, 700_001)), ("norm.weight", (4096,)), ("b.bias", (77,))):
        on_gpu = make(name, *shape, dtype=dtype, device="cuda").cpu()
        assert torch.equal(on_gpu, make(name, *shape, dtype=dtype))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

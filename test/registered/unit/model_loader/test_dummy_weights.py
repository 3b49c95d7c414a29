"""Dummy weights: the same on every device, spread as they should be, without repetitions."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.model_loader import dummy_weights
from sglang.srt.model_loader.dummy_weights import RandomTensor, dummy_tensor
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


def test_dummy_weights_have_the_scale_of_trained_ones() -> None:
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


@pytest.mark.parametrize("columns", [slice(0, 701), slice(233, 467), slice(700, 701)])
def test_a_part_is_that_of_the_whole(columns: slice) -> None:
    """Parts that begin and end within chunks, of a matrix and of stacked ones."""
    whole = make("w", 2, 1601, 701)
    stack = RandomTensor("w", (2, 1601, 701), 3, torch.float32, "cpu")
    index = (slice(1, 2), slice(17, 1598), columns)
    assert torch.equal(stack[index], whole[index])
    in_fp8 = stack.in_fp8((128, 128))
    assert torch.equal(in_fp8[index], in_fp8[:, :, :][index])


def test_only_the_part_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    real = dummy_weights._hash

    def hash_counted(places: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
        computed.append(places.numel())
        return real(places, *keys)

    monkeypatch.setattr(dummy_weights, "_hash", hash_counted)
    stack = RandomTensor("w", (16, 256, 512), 3, torch.bfloat16, "cpu")
    assert stack[4:6, :, 64:128].shape == (2, 256, 64)
    assert sum(computed) == 2 * 256 * 64
    computed.clear()
    stored = stack.in_fp8((128, 128)).stored(128, 128)
    assert stored.elements[4:6, :, 64:128].dtype == torch.float8_e4m3fn
    assert sum(computed) == 2 * 256 * 64 + 16 * 2 * 4, "elements of the part, and all scales"


@pytest.mark.parametrize("block", [(128, 128), (1, -1)])
def test_values_in_fp8_are_those_in_fp32_rounded_once(block: tuple[int, int]) -> None:
    """Each within half of the step between two numbers of e4m3, and scales all differ."""
    exact = RandomTensor("w", (300, 520), 3, torch.float32, "cpu")
    got = exact.in_fp8(block)
    stored = got.stored(1, 1)
    elements = stored.elements[:, :].float()
    assert 430 < elements.abs().max() <= 448
    step = torch.exp2(elements.abs().clamp_min(2.0**-6).log2().floor() - 3)
    error = (elements - exact[:, :] / stored.scales).abs()
    assert (error <= 0.5001 * step).all()
    assert len(set(stored.scales.view(-1).tolist())) == (3 * 5 if block[0] == 128 else 300)
    assert torch.equal(got[:, :], elements * stored.scales)


@pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_the_same_bytes(dtype: torch.dtype) -> None:
    for name, shape in (("w", (3, 700_001)), ("norm.weight", (4096,)), ("b.bias", (77,))):
        on_gpu = make(name, *shape, dtype=dtype, device="cuda").cpu()
        assert torch.equal(on_gpu, make(name, *shape, dtype=dtype))


@pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")
def test_a_gpu_makes_the_same_fp8() -> None:
    parts = [
        RandomTensor("w", (512, 1024), 3, torch.bfloat16, device).in_fp8((128, 128)).stored(1, 1)
        for device in ("cuda", "cpu")
    ]
    (elements, scales), (want, want_scales) = ((one.elements[:, :], one.scales) for one in parts)
    assert torch.equal(elements.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales.cpu(), want_scales)

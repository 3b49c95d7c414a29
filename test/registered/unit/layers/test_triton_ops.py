"""Fused kernels against fp32 references and against the layers of the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rigs.models.kernel_layers import relative_error
from rigs.models.triton_device import triton_device
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

from sglang.srt.layers import linear  # noqa: E402
from sglang.srt.layers.activation import activate_by  # noqa: E402
from sglang.srt.layers.cuda_kernels import KERNELS  # noqa: E402
from sglang.srt.layers.placement import Share  # noqa: E402
from sglang.srt.layers.triton_ops import fused_qkv, gating, gemv, norm, vocab  # noqa: E402
from sglang.srt.layers.triton_ops.arguments import (  # noqa: E402
    AngleKinds,
    ClampedGate,
    ExpertActivation,
)
from sglang.srt.layers.triton_ops.rotation import rotate  # noqa: E402


def random(*shape: int, seed: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [96, 1024, 4096])
def test_norm_and_residual_equal_the_definition(size: int, dtype: torch.dtype) -> None:
    x, residual = random(5, size, seed=1, dtype=dtype), random(5, size, seed=2, dtype=dtype)
    weight = random(size, seed=3, dtype=dtype)
    plain = F.rms_norm(x.float(), (size,), None, 1e-5) * weight.float()
    total = (x.float() + residual.float()).to(dtype)
    want = F.rms_norm(total.float(), (size,), None, 1e-5) * weight.float()
    bound = 1e-6 if dtype is torch.float32 else 5e-3
    assert relative_error(norm.rms_norm(x, weight, 1e-5), plain) < bound
    norm.add_rms_norm_(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert relative_error(x, want) < bound


@pytest.mark.parametrize("size", [128, 1000, 12288])
def test_silu_and_mul_equal_the_definition(size: int) -> None:
    x = random(3, 2 * size, seed=4)
    gate, up = x.float().chunk(2, dim=-1)
    assert relative_error(gating.silu_and_mul(x), F.silu(gate) * up) < 5e-3


@pytest.mark.parametrize(
    ("n", "k"),
    [(64, 512), (4096, 1024), (3072, 512), (16400, 256), (152, 3072), (128, 2688), (2688, 3712)],
)
@pytest.mark.parametrize("out_dtype", [HALF, torch.float32])
def test_gemv_equals_the_definition(n: int, k: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = random(1, k, seed=5), random(n, k, seed=6), random(n, seed=7)
    config = gemv.plan(n, k)
    assert config is not None
    out = torch.full((1, n), float("nan"), dtype=out_dtype, device=DEVICE)
    gemv.gemv(x, weight, bias, out, config)
    want = F.linear(x.double(), weight.double(), bias.double())
    assert relative_error(out, want) < (1e-5 if out_dtype is torch.float32 else 5e-3)
    gemv.gemv(x, weight, None, out, config)
    assert relative_error(out, want - bias.double()) < 5e-3


def test_the_product_of_an_fp32_weight_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer's weights of heads, beside one token as it is."""
    monkeypatch.setattr(linear, "fused_kernels", lambda device: KERNELS)
    x, weight = random(1, 512, seed=5), random(64, 512, seed=6, dtype=torch.float32)
    assert KERNELS.plan_gemv(64, 512) is not None and x.dtype is HALF
    out = linear.apply_linear(x, weight)
    assert out.dtype is torch.float32
    assert relative_error(out, F.linear(x.double(), weight.double())) < 1e-6


CLAMPED = ClampedGate(limit=0.5, alpha=1.7, shift=0.5)


@pytest.mark.parametrize(
    ("n", "k", "activation"),
    [
        (64, 512, "silu"), (64, 512, CLAMPED), (12288, 1024, "silu"), (1004, 256, CLAMPED),
        (152, 2688, "silu"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_gated_gemv_equals_two_kernels(
    n: int, k: int, activation: ExpertActivation, dtype: torch.dtype
) -> None:
    """Same results as the two kernels that it replaces; same bits if sums have one order."""
    x, weight = random(1, k, seed=5, dtype=dtype), random(2 * n, k, seed=6, dtype=dtype)
    config = gemv.plan(2 * n, k)
    assert config is not None
    both = torch.empty(1, 2 * n, dtype=dtype, device=DEVICE)
    gemv.gemv(x, weight, None, both, config)
    out = torch.full((1, n), float("nan"), dtype=dtype, device=DEVICE)
    gemv.gated_gemv(x, weight, out, config, activation=activation)
    apart = gating.silu_and_mul(both, activation)
    assert torch.equal(out, apart) if DEVICE == "cpu" else relative_error(out, apart) < 1e-3
    want = activate_by(activation)((x.double() @ weight.double().t()).cpu())
    assert relative_error(out.cpu(), want) < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("half", [24, 32])
def test_angles_of_each_kind_are_those_of_torch(half: int) -> None:
    """Far positions as well, whose angles are thousands of turns."""
    positions = torch.tensor([0, 1, 77, 32_767, 1_000_000] * 4, device=DEVICE)
    freqs = torch.tensor([[10_000.0], [500.0]]) ** -(torch.arange(half) / half)
    scales, multiples = torch.tensor([1.0, 1.25]), torch.tensor([1, 4])
    kinds = AngleKinds(freqs.to(DEVICE), scales.to(DEVICE), multiples.to(DEVICE))
    rounded = positions.cpu() // multiples[:, None] * multiples[:, None]
    angles = rounded.float()[:, :, None] * freqs[:, None]
    for dtype in (torch.float32, HALF):
        cos, sin = fused_qkv.rotary_angles(positions, kinds, dtype)
        wanted = angles.cos() * scales[:, None, None], angles.sin() * scales[:, None, None]
        signed = torch.cat((-wanted[1], wanted[1]), dim=-1)
        for found, want in ((cos, torch.cat((wanted[0], wanted[0]), dim=-1)), (sin, signed)):
            assert found.dtype == dtype and found.shape == (2, 20, 1, 2 * half)
            bound = 1e-3 if dtype is HALF else 1e-6
            for got, one in zip(found.squeeze(2), want.to(dtype).to(DEVICE), strict=True):
                assert relative_error(got, one) < bound


def test_gemv_leaves_odd_shapes_to_others() -> None:
    assert gemv.plan(4096, 96) is None
    assert gemv.plan(4097, 4096) is None


@pytest.mark.parametrize("size", [96, 2048, 5000])
@pytest.mark.parametrize("tokens", [Share(0, 7, 20), Share(14, 20, 20), Share(20, 20, 20)])
def test_rows_of_other_ranks_are_zero(size: int, tokens: Share) -> None:
    """The last rank may have fewer rows, or none; those behind are never looked at."""
    weight = random(7, size, seed=21)
    weight[tokens.size :] = float("nan")
    ids = torch.tensor([13, 0, 14, 6, 7, 19, 14], device=DEVICE)
    want = torch.zeros(7, size, dtype=HALF, device=DEVICE)
    for row, token in enumerate(ids.tolist()):
        if tokens.begin <= token < tokens.end:
            want[row] = weight[token - tokens.begin]
    assert torch.equal(vocab.look_up_share(ids, weight, tokens.begin, tokens.size), want)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (6, 2, 16), (7, 1, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norm_rotation_and_store_equal_the_definition(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, with_norm: bool
) -> None:
    """The same as the layers of the CPU one by one, bit for bit but for the norm's sums."""
    tokens = 5
    both = heads + kv_heads
    x = random(tokens, both + kv_heads, head_dim, seed=8, dtype=dtype)
    weight = random(both, head_dim, seed=9, dtype=dtype)
    angles = random(tokens, 1, head_dim, seed=10, dtype=torch.float32).cos().to(dtype)
    sines = random(tokens, 1, head_dim, seed=11, dtype=torch.float32).sin().to(dtype)
    loc = torch.tensor([3, 9, 4, 0, 11], device=DEVICE)
    pools = [random(12, kv_heads, head_dim, seed=12 + i, dtype=dtype) for i in range(2)]
    before = [pool.clone() for pool in pools]

    qk, v = x[:, :both].clone(), x[:, both:].clone()
    if with_norm:
        qk = F.rms_norm(qk, (head_dim,), None, 1e-6).mul_(weight)
    want = rotated_by_torch(qk, Rotation(angles, sines), False)
    packed = (weight, 1e-6) if with_norm else None
    fused_qkv.normalise_rotate_store_(x, packed, (angles, sines), loc, *pools)
    bound = 1e-6 if dtype is torch.float32 else 5e-3
    assert relative_error(x[:, :both], want) < bound
    assert torch.equal(x[:, both:], v)
    assert torch.equal(pools[0][loc], x[:, heads:both])
    assert torch.equal(pools[1][loc], v)
    others = [i for i in range(12) if i not in loc.tolist()]
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[others], old[others])


def rotated_by_torch(x: torch.Tensor, rotation: Rotation, is_interleaved: bool) -> torch.Tensor:
    """On the CPU, where layers have no kernels."""
    on_cpu = Rotation(rotation.cos.cpu(), rotation.signed_sin.cpu())
    return apply_rotary(x.cpu(), on_cpu, is_interleaved=is_interleaved).to(DEVICE)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"),
    [(5, 3, 64, 64), (3, 40, 128, 64), (130, 1, 64, 64), (4, 7, 40, 24)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rotation_equals_the_definition_in_place_and_apart(
    tokens: int,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    is_interleaved: bool,
) -> None:
    """The bits of torch's operations but for fp32, on views of wider tensors."""
    wide = random(tokens, heads + 2, head_dim + 32, seed=1, dtype=dtype)
    x = wide[:, 1:-1, 32:]
    rotation = Rotation(*(random(tokens, 1, rotary_dim, seed=2 + i, dtype=dtype) for i in range(2)))
    want = rotated_by_torch(x, rotation, is_interleaved)
    apart = rotate(x, rotation, is_interleaved=is_interleaved)
    target = torch.zeros_like(wide)
    rotate(x, rotation, target[:, 1:-1, :head_dim], is_interleaved=is_interleaved)
    before = wide.clone()
    assert rotate(x, rotation, x, is_interleaved=is_interleaved) is x
    for got in (apart, target[:, 1:-1, :head_dim], x):
        if dtype is HALF:
            assert torch.equal(got, want)
        else:  # torch rounds only the sum of the second product
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    before[:, 1:-1, 32:] = want
    target[:, 1:-1, :head_dim] = 0
    assert not target.any() and torch.equal(wide[..., :32], before[..., :32])
    assert torch.equal(wide[:, [0, -1]], before[:, [0, -1]])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no fp8")
def test_rows_are_stored_as_fp8() -> None:
    x = random(4, 8 + 4, 128, seed=20)
    loc = torch.arange(4, device=DEVICE)
    angles = torch.ones(4, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    sines = torch.zeros_like(angles)
    pools = [torch.zeros(8, 2, 128, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    fused_qkv.normalise_rotate_store_(x, None, (angles, sines), loc, *pools)
    assert torch.equal(pools[0][:4].float(), x[:, 8:10].to(torch.float8_e4m3fn).float())
    assert torch.equal(pools[1][:4].float(), x[:, 10:].to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("size", [7, 4096, 13000])
def test_the_greatest_is_the_first_of_equal_ones_and_nan_beats_all(size: int) -> None:
    nan, inf = float("nan"), float("inf")
    logits = random(9, size, seed=30, dtype=torch.float32)
    logits[1:3, [3, size - 2]] = 50.0
    logits[3], logits[4] = 0.0, -inf
    logits[4, 5] = -60.0
    logits[5], logits[6, 2] = -inf, inf
    logits[7, [1, size - 1]], logits[7, 3] = nan, inf
    logits[8], logits[8, 4] = -1.0, -nan
    want = torch.tensor([int(row.argmax()) for row in logits.cpu()])
    assert torch.equal(vocab.argmax(logits).cpu(), want)
    wider = torch.cat([logits, logits + 100.0], dim=1)
    assert torch.equal(vocab.argmax(wider[:, :size]).cpu(), want)

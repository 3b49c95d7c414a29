"""Sliding windows by Triton against the definition: rings, chunks, snapshots, decode steps."""

from __future__ import annotations

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
ON_GPU = DEVICE == "cuda"
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if ON_GPU else torch.float16

from rigs.layers.window_cases import Shape, Windows, Work  # noqa: E402
from sglang.srt.layers.attention.window_triton_backend import WindowTritonBackend  # noqa: E402
from sglang.srt.layers.triton_ops.attention.window_decode import (  # noqa: E402
    RingStep,
    decode_in_rings,
)
from sglang.srt.layers.triton_ops.rotation import rotate  # noqa: E402

SHAPES = [Shape(8, 1, 16, 4), Shape(6, 2, 24, 12), Shape(2, 2, 16, 33), Shape(4, 2, 16, 130)]


def make(shape: Shape, dtype: torch.dtype = torch.float32, *, has_sinks: bool = False) -> Windows:
    return Windows(WindowTritonBackend, shape, dtype, DEVICE, has_sinks=has_sinks)


def check(error: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert error < (1e-5 if dtype is torch.float32 else 6e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_chunks_and_decode_steps_equal_the_definition(shape: Shape, dtype: torch.dtype) -> None:
    """Prefixes shorter than the window, as long, and longer; requests of unlike lengths."""
    windows, w = make(shape, dtype, has_sinks=shape.window < 100), shape.window
    check(windows.extend([Work(1, w - 1), Work(2, 1), Work(3, 2 * w + 3)]), dtype)
    check(windows.decode([2, 1, 3]), dtype)
    check(windows.extend([Work(3, 1), Work(4, w), Work(1, w + 1), Work(2, 5)]), dtype)
    for _ in range(3):
        check(windows.decode([1, 4, 3]), dtype)
    check(windows.extend([Work(2, 3), Work(4, 2)], last_only=True), dtype)
    windows.check_rings([1, 2, 3, 4])


@pytest.mark.parametrize("at", [1, 5, 11, 12, 13, 29, 30])
def test_snapshots_amid_a_prefill_are_those_of_its_tokens(at: int) -> None:
    windows = make(SHAPES[1])
    check(windows.extend([Work(1, 7), Work(2, 20)]))
    check(windows.extend([Work(3, 4), Work(1, 30, track=(8, at)), Work(2, 13, track=(9, 2))]))
    windows.check_rings([1, 2, 3, 8, 9])


def test_requests_continue_from_a_snapshot_and_leave_it_as_it_is() -> None:
    windows = make(SHAPES[1])
    check(windows.extend([Work(1, 40, track=(8, 17)), Work(2, 9, track=(9, 5))]))
    before = [buffer.clone() for buffer in windows.pool.buffers]
    check(windows.extend([Work(3, 4, first=8, track=(7, 2)), Work(4, 15, first=9), Work(1, 1)]))
    check(windows.decode([1, 3, 4]))
    windows.check_rings([1, 3, 4, 7, 8, 9])
    kept = torch.tensor([2, 8, 9, 10], device=DEVICE)
    for buffer, old in zip(windows.pool.buffers, before, strict=True):
        assert torch.equal(*(x.index_select(1, kept).nan_to_num(7.0) for x in (buffer, old)))


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_the_definition(seed: int) -> None:
    windows = make(
        [Shape(4, 2, 16, 5), Shape(3, 1, 16, 16), Shape(2, 2, 16, 1)][seed], has_sinks=True
    )
    check(windows.walk(seed, 25))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_decode_step_rotates_as_a_kernel_before_it_does(dtype: torch.dtype) -> None:
    """The same bits in the rings and in the output."""
    numbers = torch.Generator().manual_seed(1)
    shape = SHAPES[1]

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=numbers).to(DEVICE, dtype)

    qkv = randn(3, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    angles = randn(3, 1, shape.head_dim), randn(3, 1, shape.head_dim)
    buffers = randn(2, 4, shape.kv_heads, shape.window, shape.head_dim)
    slots, positions = (torch.tensor(x, device=DEVICE) for x in ([2, 0, 3], [40, 5, 12]))
    found = []
    for is_later in (True, False):
        rings = RingStep(k=buffers[0].clone(), v=buffers[1].clone(), slots=slots)
        own_q, own_k = (q, k) if is_later else (rotate(q, angles), rotate(k, angles))
        left = angles if is_later else None
        out = decode_in_rings(own_q, own_k, v, rings, positions, 0.2, angles=left)
        found.append((out, rings.k, rings.v))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

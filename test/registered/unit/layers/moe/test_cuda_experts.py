"""Routed experts on a GPU: every way and every replay of a graph gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.model_executor.graph_capture import GraphCapture
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

EXPERTS, TOP_K = 32, 4
Work = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pair(dtype: torch.dtype, hidden: int, size: int) -> tuple[RoutedExperts, RoutedExperts]:
    """The same experts on both devices: the GPU's, then the CPU's in fp32."""
    numbers = torch.Generator().manual_seed(3)
    gpu = RoutedExperts(
        EXPERTS, hidden, size, placement=TensorPlacement(dtype=dtype, device="cuda")
    )
    cpu = RoutedExperts(
        EXPERTS, hidden, size, placement=TensorPlacement(dtype=torch.float32, device="cpu")
    )
    for on_gpu, on_cpu in zip(gpu.parameters(), cpu.parameters(), strict=True):
        on_gpu.copy_(torch.randn(on_cpu.shape, generator=numbers) * 0.1)
        on_cpu.copy_(on_gpu)
    return gpu, cpu


def work(num_tokens: int, hidden: int, dtype: torch.dtype, experts: int = EXPERTS) -> Work:
    """Tokens on the GPU that use the first `experts` experts."""
    numbers = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=numbers).to(dtype)
    weights, ids = torch.rand(num_tokens, experts, generator=numbers).topk(TOP_K, dim=-1)
    return x.cuda(), weights.cuda(), ids.cuda()


def assert_near(got: torch.Tensor, cpu: RoutedExperts, given: Work) -> None:
    x, weights, ids = (tensor.cpu() for tensor in given)
    want = cpu.forward(x.float(), weights, ids)
    tolerance = 1e-3 if got.dtype == torch.float32 else 2e-2
    assert (got.cpu().float() - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 700])
@pytest.mark.parametrize(
    ("dtype", "hidden", "size"),
    [
        (torch.bfloat16, 256, 128),
        (torch.bfloat16, 100, 60),
        (torch.float16, 256, 128),
        (torch.float32, 256, 128),
    ],
)
def test_the_sum_is_that_of_the_cpu(
    dtype: torch.dtype, hidden: int, size: int, num_tokens: int
) -> None:
    gpu, cpu = pair(dtype, hidden, size)
    given = work(num_tokens, hidden, dtype)
    assert_near(gpu.forward(*given), cpu, given)


def test_ids_and_weights_of_any_strides_are_taken() -> None:
    gpu, _ = pair(torch.bfloat16, 256, 128)
    x, weights, ids = work(64, 256, torch.bfloat16)
    want = gpu.forward(x, weights, ids)
    wider = torch.cat([ids, ids], dim=1)[:, :TOP_K]
    assert torch.equal(gpu.forward(x, torch.cat([weights] * 2, dim=1)[:, :TOP_K], wider), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_serves_tokens_that_choose_others(dtype: torch.dtype) -> None:
    gpu, cpu = pair(dtype, 256, 128)
    inputs = work(8, 256, dtype)
    outputs: list[torch.Tensor] = []
    graph, _ = GraphCapture().capture(lambda: outputs.append(gpu.forward(*inputs)))
    for experts in (EXPERTS, TOP_K, 9):
        given = work(8, 256, dtype, experts)
        for tensor, value in zip(inputs, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        assert_near(outputs[-1], cpu, given)
        assert torch.equal(outputs[-1], gpu.forward(*given))

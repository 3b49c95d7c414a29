"""fp8 products by DeepGEMM: what surrounds them, and when they are used. Without a GPU, or without
the package, they are their definitions."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from rigs.models.kernel_layers import DEVICE, randn, relative_error
from rigs.models.scaled_weights import dequantized, fp8_weight
from rigs.models.scaled_weights import product as product_of
from sglang.srt.environ import envs
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight
from sglang.srt.layers.triton_ops.expert_order import most_tiles
from sglang.srt.layers.triton_ops.rounding import quantize_activations
from sglang.srt.layers.triton_ops.scaled import deep_gemm, routed_experts
from sglang.srt.layers.triton_ops.scaled.deep_gemm import Scaled, dense_product, grouped_product
from sglang.srt.layers.triton_ops.scaled.product import (
    more_rows_of_library,
    multiply_fp8_by_library,
)
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

EXPERTS, TOP_K, HIDDEN, FEATURES = 5, 3, 256, 128
IS_INSTALLED: Final = importlib.util.find_spec(deep_gemm.PACKAGE) is not None


def defined(x: Scaled, weight: Scaled, out: torch.Tensor, experts: torch.Tensor) -> None:
    """`GroupedProduct` by definition, in fp64. Rows of no expert are left alone."""
    elements, scales = x
    assert elements.shape[0] % 128 == 0 and scales.stride(0) == 1
    rows = elements.double() * scales.double().repeat_interleave(128, 1)
    plain = dequantized(ScaledWeight(elements=weight[0], scales=weight[1]))
    for begin in range(0, len(rows), 128):
        expert = int(experts[begin])
        own = slice(begin, begin + 128)
        assert (experts[own] == expert).all(), "a tile has one expert"
        if expert >= 0:
            out[own] = (rows[own].nan_to_num() @ plain[expert].t()).to(out.dtype)


def dense(x: Scaled, weight: Scaled, out: torch.Tensor) -> None:
    """`DenseProduct` by definition, in fp64."""
    assert x[1].stride() == (1, len(out)) and len(out) % 4 == 0
    rows = x[0].double() * x[1].double().repeat_interleave(128, 1)
    plain = dequantized(ScaledWeight(elements=weight[0], scales=weight[1]))
    out.copy_((rows @ plain.t()).to(out.dtype))


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the products."""
    calls: list[int] = []
    is_real = DEVICE == "cuda" and IS_INSTALLED
    real = deep_gemm.load_library(torch.device(DEVICE)) if is_real else None
    assert not is_real or real is not None, "the package does not work here"
    real = real or deep_gemm.Library(dense, defined)

    def multiply_one(x: Scaled, weight: Scaled, out: torch.Tensor) -> None:
        calls.append(len(out))
        real.dense(x, weight, out)

    def multiply(x: Scaled, weight: Scaled, out: torch.Tensor, experts: torch.Tensor) -> None:
        calls.append(len(out))
        real.grouped(x, weight, out, experts)

    monkeypatch.setattr(deep_gemm, "_FEWEST_TOKENS", 20)
    monkeypatch.setattr(deep_gemm, "_FEWEST_USES", 10)
    library = deep_gemm.Library(multiply_one, multiply)
    monkeypatch.setattr(deep_gemm, "load_library", lambda device: library)
    return calls


def weights(seed: int = 0) -> tuple[ScaledWeight, ScaledWeight]:
    return (
        fp8_weight(EXPERTS, 2 * FEATURES, HIDDEN, height=128, seed=seed),
        fp8_weight(EXPERTS, HIDDEN, FEATURES, height=128, seed=seed + 1),
    )


def choice(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=numbers).argsort(1)[:, :TOP_K].contiguous()
    factors = torch.rand(tokens, TOP_K + 1, generator=numbers)[:, :TOP_K]
    return factors.to(DEVICE), ids.to(DEVICE)


@pytest.mark.parametrize(("tokens", "total"), [(30, EXPERTS), (70, EXPERTS), (40, EXPERTS + 2)])
def test_the_library_gives_what_the_kernel_gives(
    product: list[int], tokens: int, total: int
) -> None:
    """Some experts have several tiles, some have none, and some are other ranks'."""
    gate_up, down = weights()
    x = randn(tokens, HIDDEN, seed=1, dtype=torch.bfloat16)
    factors, ids = choice(tokens, total)
    if tokens == 70:
        ids[:, 0], ids[:, 1], ids[:, 2] = 3, 0, 1
    plan = routed_experts._FP8_PLANS[-1]
    run = routed_experts.run_scaled_routed_experts
    want = run(x, factors, ids, gate_up, down, plan, num_experts=total)
    assert not product
    got = run(x, factors, ids, gate_up, down, num_experts=total)
    # The rows that the next power of two tokens can need.
    bound = most_tiles({30: 32, 70: 128, 40: 64}[tokens] * TOP_K, EXPERTS, 128)
    assert product == [bound * 128] * 2
    assert got.shape == want.shape and got.dtype == want.dtype
    assert relative_error(got, want.double()) < 3e-2


def test_the_kernel_stays_where_the_library_does_not_fit(product: list[int]) -> None:
    gate_up, down = weights()
    x = randn(30, HIDDEN, seed=1, dtype=torch.bfloat16)
    assert grouped_product(10, x, gate_up, down) is not None
    assert grouped_product(9.9, x, gate_up, down) is None
    assert grouped_product(10, x[:19], gate_up, down) is None
    assert grouped_product(10, x.half(), gate_up, down) is None
    assert grouped_product(10, x, gate_up, fp8_weight(EXPERTS, HIDDEN, FEATURES)) is None
    assert grouped_product(10, x, fp8_weight(EXPERTS, 64, 96, height=32, group=32)) is None


@pytest.mark.parametrize("tokens", [193, 256])
def test_a_layer_gives_the_definition(product: list[int], tokens: int) -> None:
    weight = fp8_weight(256, 384, height=128)
    x = randn(tokens, 384, seed=1, dtype=torch.bfloat16)
    bias = randn(256, seed=2, dtype=torch.bfloat16)
    elements, scales = quantize_activations(x, 128, more_rows=more_rows_of_library(tokens, weight))
    rows = RoundedRows(elements=elements, scales=scales, num_tokens=tokens, dtype=x.dtype)
    got = multiply_fp8_by_library(rows, weight, bias, torch.bfloat16)
    assert product == [-(-tokens // 4) * 4]
    assert relative_error(got, product_of(x, weight) + bias.double()) < 1e-2


def test_a_layer_stays_with_sizes_that_a_warm_up_meets(product: list[int]) -> None:
    weight, dtype = fp8_weight(256, 384, height=128), torch.bfloat16
    found = [
        tokens
        for tokens in (192, 193, 256, 257, 4096, 8191, 8192, 16384)
        if dense_product(tokens, weight, dtype) is not None
    ]
    assert found == [193, 256, 8192]
    assert dense_product(256, weight, torch.float32) is None
    assert dense_product(256, fp8_weight(256, 384), dtype) is None
    assert dense_product(256, fp8_weight(64, 384, height=64), dtype) is None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A package that is found. Nothing is cached."""
    module = SimpleNamespace(fp8_gemm_nt=dense, m_grouped_fp8_gemm_nt_contiguous=defined)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    return module


def load() -> Any:
    return deep_gemm.load_library.__wrapped__(torch.device("cpu"))


def test_a_package_that_works_is_used(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load() == (dense, defined)
    with envs.SGLANG_ENABLE_JIT_DEEPGEMM.override(False):
        assert load() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load() is None


def test_a_package_that_fails_is_named_and_not_used(
    package: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("nvcc is not found")

    def powers_of_two(x: Scaled, weight: Scaled, out: torch.Tensor, _: torch.Tensor) -> None:
        out.fill_(128 * 0.5 * 1.0)

    caplog.set_level(logging.WARNING)
    package.m_grouped_fp8_gemm_nt_contiguous = refuse
    assert load() is None
    package.m_grouped_fp8_gemm_nt_contiguous = powers_of_two
    assert load() is None
    del package.m_grouped_fp8_gemm_nt_contiguous
    assert load() is None
    first, second, third = (record.message for record in caplog.records)
    assert first == "fp8 products without DeepGEMM, which fails here: nvcc is not found"
    assert second == "fp8 products without DeepGEMM, which gives others on cpu"
    assert "m_grouped_fp8_gemm_nt_contiguous" in third

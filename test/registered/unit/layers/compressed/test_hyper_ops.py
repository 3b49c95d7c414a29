"""Kernels of hyper-connections, and of outputs by groups: what the same layers give in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rigs.layers.delta_layers import fill
from rigs.layers.quick_interpreter import quicken_interpreter
from rigs.models.kernel_layers import DEVICE, HALF, randn, relative_error
from sglang.srt.layers import linear
from sglang.srt.layers.compressed.hyper_connection import (
    HyperConnection,
    HyperHead,
    HyperOptions,
    Streams,
)
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.layernorm import RMSNorm, WideRMSNorm
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.triton_ops.arguments import StreamsJoin
from sglang.srt.layers.triton_ops.hyper import streams as kernels
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

if DEVICE == "cpu":
    quicken_interpreter()

EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257]


@pytest.fixture(autouse=True)
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it has old values."""
    empty, like, own = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(found: torch.Tensor) -> torch.Tensor:
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(own(*a, **k)))


def connection(
    dtype: torch.dtype, hidden: int, count: int, iterations: int, norm: type[RMSNorm] = RMSNorm
) -> HyperConnection:
    placement = TensorPlacement(dtype=dtype, device=DEVICE)
    options = HyperOptions(
        hidden_size=hidden, streams=count, iterations=iterations, eps=1e-6, norm_eps=1e-5
    )
    layer = HyperConnection(options, norm(hidden, 1e-5, placement=placement), placement)
    fill(layer, count)
    return layer


def both(layer: HyperConnection, given: Streams) -> list[list[torch.Tensor]]:
    """The input of a block and the streams behind it, in torch and by the kernels."""
    found = []
    for own in (None, KERNELS):
        layer._kernels = own
        rest = (None if part is None else part.clone() for part in given[1:])
        copied = Streams(given.values.clone(), *rest)
        x, zeros, streams = layer.enter(copied)
        assert not zeros.any() and zeros.shape == x.shape and streams.weights is not None
        behind = streams._replace(out=x)
        join = StreamsJoin(x, None, streams.weights)
        last = behind.joined() if own is None else KERNELS.join_streams(streams.values, join)
        found.append([x, streams.values, streams.weights, last])
    return found


def heads(num_tokens: int, hidden: int, count: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The input of the output head, in torch and by the kernels, after a block and without one."""
    options = connection(dtype, hidden, count, 1).options
    placement = TensorPlacement(dtype=dtype, device=DEVICE)
    head, norm = HyperHead(options, placement), WideRMSNorm(hidden, 1e-5, placement=placement)
    fill(head, count)
    fill(norm, hidden)
    given, found = streams_of(num_tokens, count, hidden, dtype), []
    for own in (None, KERNELS):
        head._kernels = own
        last = given._replace(rest=None if given.rest is None else given.rest.clone())
        found.append([head.forward(last, norm), head.forward(Streams(given.values), norm)])
    return found


def bounded(found: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype and got.isfinite().all()
        assert relative_error(got, want) < (1e-5 if dtype is torch.float32 else 5e-3)


def streams_of(num_tokens: int, count: int, hidden: int, dtype: torch.dtype) -> Streams:
    values = randn(num_tokens, count, hidden, seed=num_tokens, dtype=dtype)
    weights = randn(num_tokens, count + count * count, seed=1).abs()
    out, rest = (randn(num_tokens, hidden, seed=seed, dtype=dtype) for seed in (2, 3))
    return Streams(values, weights, out, rest)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [*((edge, torch.float32) for edge in EDGES), (1, HALF), (65, HALF)]
)
def test_streams_between_blocks_are_those_of_torch(num_tokens: int, dtype: torch.dtype) -> None:
    layer = connection(dtype, 40, 4, 3)
    bounded(both(layer, streams_of(num_tokens, 4, 40, dtype)), dtype)
    bounded(heads(num_tokens, 40, 4, dtype), dtype)


@pytest.mark.parametrize("norm", [RMSNorm, WideRMSNorm])
@pytest.mark.parametrize(
    ("hidden", "count", "iterations"), [(96, 4, 20), (100, 2, 1), (16, 3, 2), (130, 1, 3)]
)
@pytest.mark.parametrize("num_tokens", [1, 18])
def test_sizes_that_no_block_divides(
    num_tokens: int, hidden: int, count: int, iterations: int, norm: type[RMSNorm]
) -> None:
    """The block before gives one or two parts of its output, or there is none. Then the streams of
    a token may be equal."""
    layer = connection(torch.float32, hidden, count, iterations, norm)
    given = streams_of(num_tokens, count, hidden, torch.float32)
    before_all = Streams(given.values), Streams(given.values[:, 0].contiguous())
    for streams in (given, given._replace(rest=None), *before_all):
        bounded(both(layer, streams), torch.float32)
    bounded(heads(num_tokens, hidden, count, torch.float32), torch.float32)


@pytest.mark.parametrize("programs", [1, 2, 9, 512])
def test_columns_may_be_divided_over_any_number_of_programs(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    layer = connection(torch.float32, 200, 4, 3)
    bounded(both(layer, streams_of(3, 4, 200, torch.float32)), torch.float32)


def test_no_span_is_empty() -> None:
    for hidden in range(1, 9000, 37):
        for tokens in (1, 17, 256, 257, 4000, 70000):
            (at_once, columns, _), spans = kernels.plan_join(tokens, hidden)
            blocks = -(-hidden // columns)
            assert (spans - 1) * -(-blocks // spans) < blocks
            assert spans == 1 or spans * -(-tokens // at_once) <= kernels.PROGRAMS


def test_streams_of_some_tokens_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = connection(torch.float32, 40, 4, 4)
    layer._kernels = KERNELS
    x, _, streams = layer.enter(streams_of(20, 4, 40, torch.float32))
    rows = torch.tensor([19, 3], device=DEVICE)
    _, _, some = layer.enter(streams.of(rows).behind(x[rows], None))
    _, _, whole = layer.enter(streams.behind(None, x))
    torch.testing.assert_close(some.values, whole.values[rows])


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize(
    ("groups", "outputs", "inputs"), [(2, 16, 32), (3, 20, 300), (1, 33, 24), (3, 16, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_outputs_of_groups_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    groups: int,
    outputs: int,
    inputs: int,
    num_tokens: int,
) -> None:
    monkeypatch.setattr(linear, "fused_kernels", lambda device: KERNELS)
    x = randn(num_tokens, groups, inputs, seed=1, dtype=dtype)
    weight: Any = randn(groups, outputs, inputs, seed=2, dtype=dtype)
    want = torch.einsum("ngi,goi->ngo", x.float(), weight.float())
    got = linear.apply_by_group(x, weight)
    assert got.shape == want.shape and got.dtype == dtype
    assert relative_error(got, want) < (1e-5 if dtype is torch.float32 else 2e-3)

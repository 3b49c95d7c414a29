"""Kernels that start early give the bits of kernels that wait for the end of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rigs.models.attention_cases import PagedContexts
from rigs.models.kernel_layers import HALF
from rigs.models.scaled_weights import fp8_weight, int4_weight
from rigs.models.triton_device import triton_device
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()

from sglang.srt.layers.cuda_kernels import KERNELS, FusedKernels  # noqa: E402
from sglang.srt.layers.triton_ops import early_start  # noqa: E402
from sglang.srt.layers.triton_ops.arguments import ScaledWeight  # noqa: E402
from sglang.srt.layers.triton_ops.attention import decode_attention as decode  # noqa: E402
from sglang.srt.layers.triton_ops.attention import online_softmax  # noqa: E402
from sglang.srt.layers.triton_ops.fused_qkv import normalise_rotate_store_  # noqa: E402

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


WEIGHTS: dict[str, Callable[..., ScaledWeight]] = {
    "fp8": fp8_weight,
    "int4": partial(int4_weight, group=128),
}


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_chain_of_weights_with_scales_has_the_same_bits(kind: str, rows: int) -> None:
    """Norms, rounding, gates and products of several rows, split over programs."""
    ups = [WEIGHTS[kind](2 * INNER, SIZE, seed=nth) for nth in range(LAYERS)]
    downs = [WEIGHTS[kind](SIZE, INNER, seed=LAYERS + nth) for nth in range(LAYERS)]
    norm = torch.ones(SIZE, device=DEVICE, dtype=HALF)

    def run() -> torch.Tensor:
        x = torch.linspace(-1, 1, rows * SIZE, device=DEVICE).view(rows, SIZE).to(HALF)
        residual = torch.zeros_like(x)
        for up, down in zip(ups, downs, strict=True):
            KERNELS.add_rms_norm_(x, residual, norm, 1e-6, False)
            inner = KERNELS.silu_and_mul(KERNELS.multiply_scaled(x, up))
            KERNELS.multiply_scaled(inner, down, out=x)
        return residual + x

    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        wanted = run()
    early_start._starts_early.cache_clear()
    assert wanted.isfinite().all()
    for _ in range(TURNS):
        assert torch.equal(run(), wanted)


HEADS, KV_HEADS, HEAD_DIM, VERIFIED = 8, 2, 64, 4
BEFORE = 436
"""Tokens before those verified, which then are in the part of a context that is read early."""


class VerifiedLayers:
    """A verification of four tokens of one request in several layers, whose slots still have keys
    and values of earlier tokens."""

    def __init__(self, count: int) -> None:
        numbers = torch.Generator().manual_seed(3)
        self.lens = torch.arange(1, 1 + VERIFIED, device=DEVICE) + BEFORE
        self.contexts = [
            PagedContexts(
                [BEFORE + VERIFIED, nth + 1],
                KV_HEADS,
                HEAD_DIM,
                page_size=16,
                dtype=torch.float32,
                device=DEVICE,
            )
            for nth in range(count)
        ]
        self.kept = [(one.k.clone(), one.v.clone()) for one in self.contexts]
        self.rows = [one.rows[:1].repeat(VERIFIED) for one in self.contexts]
        self.loc = [
            one.table[one.rows[0], BEFORE : BEFORE + VERIFIED].long() for one in self.contexts
        ]
        shape = (VERIFIED, HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.qkv = [torch.randn(shape, generator=numbers).to(DEVICE) for _ in range(count)]
        self.gates = torch.randn((VERIFIED, HEADS, HEAD_DIM), generator=numbers).to(DEVICE)
        turns = torch.randn((2, VERIFIED, 1, HEAD_DIM), generator=numbers).to(DEVICE)
        self.angles = turns[0], turns[1]
        self.norm = torch.ones(HEAD_DIM, device=DEVICE)
        self.arrivals = decode.make_arrivals(DEVICE)

    def prepare(self, nth: int) -> torch.Tensor:
        """Store a layer's keys and values; returns its queries, keys and values."""
        one = self.contexts[nth]
        qkv = KERNELS.rms_norm(self.qkv[nth], self.norm, 1e-6, False)
        normalise_rotate_store_(qkv, None, self.angles, self.loc[nth], one.k, one.v)
        return qkv

    def attend(self, nth: int, qkv: torch.Tensor, gated: bool) -> torch.Tensor:
        one = self.contexts[nth]
        return decode.decode_attention(
            qkv[:, :HEADS], one.k, one.v, one.table, self.rows[nth], self.lens, 0.1, self.arrivals,
            written=VERIFIED, gates=self.gates if gated else None,
        )  # fmt: skip

    def run(self, gated: bool) -> list[torch.Tensor]:
        """The results of all layers."""
        for one, (k, v) in zip(self.contexts, self.kept, strict=True):
            one.k.copy_(k)
            one.v.copy_(v)
        if DEVICE == "cuda":
            # Work for a few milliseconds, in which all kernels are queued: otherwise the device
            # would wait for each launch.
            busy = torch.ones(4096, 4096, device=DEVICE)
            for _ in range(4):
                torch.mm(busy, busy)
        return [self.attend(nth, self.prepare(nth), gated) for nth in range(len(self.contexts))]


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_verified_together_see_each_other(gated: bool) -> None:
    layers = VerifiedLayers(min(LAYERS, 20))
    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        wanted = layers.run(gated)
    early_start._starts_early.cache_clear()
    for _ in range(TURNS):
        # A kernel compiled to start early may round otherwise; wrong keys change the first digit.
        torch.testing.assert_close(layers.run(gated), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter shows what is read before the wait")
@pytest.mark.parametrize("gated", [False, True])
def test_attention_reads_what_the_step_writes_after_the_wait(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each program, the kernel before stores its keys and values at the last moment: during
    the wait."""
    layers = VerifiedLayers(1)
    qkv = layers.prepare(0)
    wanted = layers.attend(0, qkv, gated)
    context, loc = layers.contexts[0], layers.loc[0]
    before = [place[loc] for place in layers.kept[0]]
    stored = [place[loc] for place in (context.k, context.v)]
    places: list[torch.Tensor] = []  # the interpreter's copies
    split_range = online_softmax.split_range

    def note(_: Any, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> None:
        places[:] = k, v

    def put(all_values: list[torch.Tensor]) -> None:
        for place, values in zip(places, all_values, strict=True):
            place[loc] = values

    def begin(*arguments: Any) -> Any:
        put(before)
        return split_range(*arguments)

    monkeypatch.setattr(decode._decode_kernel, "pre_run_hooks", [note])
    monkeypatch.setattr(decode, "split_range", begin)
    monkeypatch.setattr(decode, "await_kernels_before", lambda _: put(stored))
    monkeypatch.setattr(decode, "early_start", lambda _, **__: {"EARLY": 1})
    assert torch.equal(layers.attend(0, qkv, gated), wanted)


def test_kernels_of_many_rows_do_not_start_early() -> None:
    few, many = torch.zeros(8, 1, device=DEVICE), torch.zeros(9, 1, device=DEVICE)
    is_able = int(device_runtime(few.device).starts_kernels_early)
    start = early_start.early_start
    assert start(few)["EARLY"] == start(many, most_rows=9)["EARLY"] == is_able
    assert start(few, is_short=True)["EARLY"] == 2 * is_able
    assert start(few[:1], is_short=True)["EARLY"] == is_able
    assert start(many) == {"EARLY": 0}
    early_start._starts_early.cache_clear()
    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        assert start(few) == {"EARLY": 0}

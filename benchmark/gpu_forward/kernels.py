"""The fastest kernel for each operation on this GPU: the basis of the choices in `layers/`.

Shapes are Qwen3-8B's (32 query and 8 KV heads of 128), of `few` Qwen3-Next's, inputs random, times
medians of CUDA events. Limits (copy bandwidth, matrix product rate) are measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmark.command import Command
from benchmark.gpu_timing import add_limits, median_ms
from benchmark.report import Report
from sglang.srt.layers.attention.dense_attention import dense_attention
from sglang.srt.layers.triton_ops import (
    expert_choice,
    fused_delta_net,
    fused_experts,
    fused_qkv,
    gating,
    gemv,
    norm,
)
from sglang.srt.layers.triton_ops.arguments import (
    DeltaLayout,
    DeltaStates,
    ExpertChoice,
    ExpertWeights,
    ScaledWeight,
)
from sglang.srt.layers.triton_ops.attention.decode_attention import decode_attention, make_arrivals
from sglang.srt.layers.triton_ops.attention.extend_attention import (
    extend_attention,
    plan_blocks,
)
from sglang.srt.layers.triton_ops.scaled.linear import multiply_scaled, round_rows
from sglang.srt.layers.triton_ops.scaled.product import Tiles, multiply_on_tensor_cores

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16, device="cuda")


def attempt(
    report: Report, case: dict[str, Any], work: Callable[[], object], amount: float,
    unit: str = "TB/s",
) -> None:  # fmt: skip
    """Time `work`; its rate is `amount`, of bytes or operations, by its time, in `unit`."""
    try:
        work()
        ms = median_ms(work)
    except Exception as error:  # noqa: BLE001 - recorded, since libraries refuse some shapes
        report.add("fails", True, "yes or no", case, error=" ".join(str(error).split())[:160])
        return
    report.add("time", ms, "ms", case)
    report.add("rate", amount / ms / 1e9, unit, case)


def prefill(report: Report) -> None:
    """Causal attention of new tokens, without a prefix and after one. Rate: TFLOP/s."""
    for prefix, new in ((0, 1024), (0, 2048), (0, 8192), (0, 32768), (24576, 8192), (8192, 64)):
        context = prefix + new
        q = random(new, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
        k, v = random(context, KV_HEADS, DIM), random(context, KV_HEADS, DIM)
        flops = 4 * HEADS * DIM * (new * prefix + new * (new + 1) / 2)
        base = {"what": "prefill", "prefix": prefix, "new": new}
        q_first, k_first, v_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        cu_q = torch.tensor([0, new], dtype=torch.int32, device="cuda")
        cu_k = torch.tensor([0, context], dtype=torch.int32, device="cuda")
        ways: dict[str, tuple[Callable[[], object], float]] = {
            "flash varlen": (
                partial(
                    torch.ops.aten._flash_attention_forward,
                    q, k, v, cu_q, cu_k, new, context, 0.0, True, False, scale=SCALE,
                ),
                flops,
            ),
        }  # fmt: skip
        if prefix:
            ways["cudnn, prefix only"] = (
                partial(dense_attention, q, k[:prefix], v[:prefix], SCALE, causal=False),
                4 * HEADS * DIM * new * prefix,
            )
        else:
            ways["cudnn"] = partial(dense_attention, q, k, v, SCALE, causal=True), flops
            ways["sdpa"] = (
                partial(
                    F.scaled_dot_product_attention,
                    q_first, k_first, v_first, is_causal=True, enable_gqa=True,
                ),
                flops,
            )  # fmt: skip
            ways["cudnn varlen"] = (
                partial(
                    torch.ops.aten._cudnn_attention_forward,
                    q, k, v, None, cu_q, cu_q, new, new, True, 0.0, True, False, scale=SCALE,
                ),
                flops,
            )  # fmt: skip
        for by, (work, amount) in ways.items():
            attempt(report, {**base, "by": by}, work, amount, "TFLOP/s")
        slots = torch.arange(context, dtype=torch.int32, device="cuda").view(1, -1)
        blocks = plan_blocks(
            [(0, 0, prefix, new)], group=4, num_kv_heads=KV_HEADS, head_dim=DIM, device="cuda"
        )
        out = torch.empty(new, HEADS * DIM, dtype=BF16, device="cuda")
        for launch in ((64, 8, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), (32, 4, 4)):
            case = {**base, "by": "triton", "launch": launch}
            case |= {"rows": blocks.rows, "splits": blocks.splits}
            work = partial(extend_attention, q, k, v, slots, blocks, SCALE, out, launch=launch)
            attempt(report, case, work, flops, "TFLOP/s")


def plan(report: Report) -> None:
    """The cost of the first call with a new length. Milliseconds of the CPU."""
    for new in (1111, 1112, 2048, 3001, 5003, 5004):
        q, k, v = random(new, HEADS, DIM), random(new, KV_HEADS, DIM), random(new, KV_HEADS, DIM)
        torch.cuda.synchronize()
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            dense_attention(q, k, v, SCALE, causal=True)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
        for turn, ms in zip(("first", "second", "third"), times, strict=True):
            report.add(turn, ms, "ms", {"what": "plan", "new": new})


def decode(report: Report) -> None:
    """One token of each request over its context, pages of 64 in random order. Rate: TB/s."""
    arrivals = make_arrivals("cuda")
    for count, context in ((1, 1024), (1, 8192), (1, 32768), (64, 2048), (256, 320)):
        pages = count * -(-context // 64) + 1
        for dtype in (BF16, torch.float8_e4m3fn):
            k, v = (random(pages * 64, KV_HEADS, DIM).to(dtype) for _ in range(2))
            order = torch.randperm(pages - 1, device="cuda") + 1
            firsts = order.view(count, -1, 1) * 64
            slots = (firsts + torch.arange(64, device="cuda")).view(count, -1).to(torch.int32)
            q = random(count, HEADS, DIM)
            rows = torch.arange(count, device="cuda")
            lens = torch.full((count,), context, device="cuda")
            for splits in ((1, 64), (2, 64), (4, 64), (16, 64), (32, 64), (4, 2048), (8, 2048)):
                if splits[0] * count * KV_HEADS < 256 or splits[0] * count > 2048:
                    continue
                for launch in ((64, 4, 3), (64, 4, 5), (128, 4, 3), (64, 8, 3)):
                    if dtype is not BF16 and launch not in ((64, 4, 3), (64, 4, 5)):
                        continue
                    attempt(
                        report,
                        {
                            "what": "decode",
                            "bs": count,
                            "context": context,
                            "kv": str(dtype).removeprefix("torch."),
                            "splits": splits,
                            "launch": launch,
                        },
                        partial(
                            decode_attention,
                            q, k, v, slots, rows, lens, SCALE, arrivals,
                            splits=splits, launch=launch,
                        ),
                        2 * count * context * KV_HEADS * DIM * k.element_size(),
                    )  # fmt: skip


def linear(report: Report) -> None:
    """The model's matrix products at decode's sizes. Rate: TB/s of weights."""
    shapes = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
    for n, k in shapes:
        weight = random(n, k)
        amount = weight.nbytes
        for count in (1, 2, 8, 64, 256):
            x = random(count, k)
            base = {"what": "linear", "n": n, "k": k, "rows": count}
            attempt(report, {**base, "by": "cublas"}, partial(F.linear, x, weight), amount)
            if n > 100_000:
                attempt(
                    report,
                    {**base, "by": "cublas, fp32 out"},
                    partial(torch.mm, x, weight.t(), out_dtype=torch.float32),
                    amount,
                )
        x, out = random(1, k), random(1, n)
        for config in (
            (2, 1024, 4), (4, 1024, 4), (8, 512, 4), (4, 512, 4), (2, 2048, 4), (1, 2048, 4),
            (8, 256, 4), (16, 256, 4), (4, 1024, 8), (8, 1024, 8),
        ):  # fmt: skip
            if k % config[1]:
                continue
            attempt(
                report,
                {"what": "linear", "n": n, "k": k, "rows": 1, "by": "gemv", "config": config},
                partial(gemv.gemv, x, weight, None, out, config),
                amount,
            )


def scaled(report: Report) -> None:
    """The layers' products with fp8 and 4-bit weights, with the rounding of activations. For 64
    rows and fp8 also tiles of other sizes, without it. Rate: TB/s of weights."""
    sizes = [
        Tiles(outputs, 64, 8, 4, stages, depth)
        for outputs in (32, 64, 128) for stages in (3, 4) for depth in (1, 2)
    ]  # fmt: skip
    for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (7168, 16384)):
        fp8 = ScaledWeight(
            elements=random(n, k).to(torch.float8_e4m3fn),
            scales=torch.rand(n // 128, k // 128, device="cuda"),
        )
        integers = torch.randint(256, (n, k // 2), dtype=torch.uint8, device="cuda")
        int4 = ScaledWeight(elements=integers, scales=random(n, k // 128))
        for name, weight in (("fp8", fp8), ("int4", int4)):
            for count in (1, 2, 8, 16, 64):
                attempt(
                    report,
                    {"what": "scaled", "n": n, "k": k, "rows": count, "weights": name},
                    partial(multiply_scaled, random(count, k), weight),
                    weight.elements.nbytes,
                )
        x = round_rows(random(64, k), fp8)
        out = torch.empty(64, n, dtype=BF16, device="cuda")
        for tiles, splits in product(sizes, (1, 2, 4, 8)):
            programs = n // tiles.outputs
            if not 96 <= programs * splits <= 800 or (splits > 1 and programs > 132):
                continue
            attempt(
                report,
                {
                    "what": "scaled", "n": n, "k": k, "rows": 64, "tiles": astuple(tiles),
                    "splits": splits,
                },
                partial(multiply_on_tensor_cores, x, fp8, None, out, (tiles, splits)),
                fp8.elements.nbytes,
            )  # fmt: skip


def fused(report: Report) -> None:
    """The layers between the products. Rate: TB/s read and written."""
    for count in (1, 64, 8192):
        x, residual = random(count, 4096), random(count, 4096)
        weight = random(4096)
        attempt(
            report,
            {"what": "add_rms_norm", "rows": count},
            partial(norm.add_rms_norm_, x, residual, weight, 1e-6),
            4 * x.nbytes,
        )
        gate_up = random(count, 24576)
        attempt(
            report,
            {"what": "silu_and_mul", "rows": count},
            partial(gating.silu_and_mul, gate_up),
            1.5 * gate_up.nbytes,
        )
        packed, head_weight = random(count, 48, DIM), random(40, DIM)
        angles = random(count, 1, DIM)
        loc = torch.randperm(count, device="cuda")
        k_pool, v_pool = random(count, KV_HEADS, DIM), random(count, KV_HEADS, DIM)
        attempt(
            report,
            {"what": "norm, rotation, store", "rows": count},
            partial(
                fused_qkv.normalise_rotate_store_,
                packed, (head_weight, 1e-6), (angles, angles), loc, k_pool, v_pool,
            ),
            2 * packed.nbytes,
        )  # fmt: skip


def few(report: Report) -> None:
    """Experts and linear attention of few tokens. Rate: TB/s of weights used, or of states."""
    gate_up, down = random(512, 1024, 2048), random(512, 2048, 512)
    shared = random(1024, 2048), random(2048, 512)
    weights = ExpertWeights(gate_up=gate_up, down=down, shared=shared)
    choice = ExpertChoice(
        top_k=10, scoring="softmax", renormalize=True, factor=1.0, correction_bias=None,
        has_shared=True, shared_gate=random(1, 2048), groups=1, top_groups=1, two_of_group=False,
    )  # fmt: skip
    layout = DeltaLayout(
        q=0, k=128, v=256, z=512, b=12_288, a=12_290, qk_step=768, v_step=768, ba_step=4,
        key_heads=16, repeats=2, key_dim=128, value_dim=128, kernel=4,
    )  # fmt: skip
    conv_weight = torch.randn(8192, 4, device="cuda")
    log_decay, time_bias = torch.randn(2, 32, device="cuda")
    temporal, conv = torch.randn(65, 32, 128, 128, device="cuda"), random(65, 8192, 3)

    def attend(x: torch.Tensor, states: DeltaStates) -> torch.Tensor:
        gates = conv_weight, log_decay, time_bias
        return fused_delta_net.attend_linearly(x, layout, gates, (x[0, :128], 1e-6), states)

    for count in (1, 2, 8, 64):
        x, logits = random(count, 2048), random(count, 512)
        chosen = expert_choice.choose_experts(logits, choice, x)
        base = {"rows": count}
        attempt(
            report,
            {"what": "choice of experts", **base},
            partial(expert_choice.choose_experts, logits, choice, x),
            logits.nbytes + x.nbytes,
        )
        num_used = len(chosen[1].unique())  # type: ignore[no-untyped-call]
        used = num_used * 3 * 512 * 2048 * 2 + sum(w.nbytes for w in shared)
        attempt(
            report,
            {"what": "experts", **base},
            partial(fused_experts.run_experts, x, *chosen, weights),
            used,
        )
        x, slots = random(count, 12_352), torch.arange(1, count + 1, device="cuda")
        bounds = torch.tensor([0, count], device="cuda")
        for what, own, ends in (("decoding", slots, None), ("one request", slots[:1], bounds)):
            states = DeltaStates(
                temporal=temporal, conv=conv, slots=own, read_slots=own, bounds=ends
            )
            attempt(
                report,
                {"what": f"linear attention, {what}", **base},
                partial(attend, x, states),
                2 * len(own) * temporal[0].nbytes,
            )


PARTS = {
    "prefill": prefill, "plan": plan, "decode": decode, "linear": linear, "fused": fused,
    "few": few, "scaled": scaled,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))


def run(args: argparse.Namespace, report: Report) -> None:
    add_limits(report)
    with torch.inference_mode():
        for name in args.only:
            PARTS[name](report)


COMMAND: Final = Command(
    run=run, add_options=add_options, devices=("cuda",), quick={"only": ["fused"]}
)

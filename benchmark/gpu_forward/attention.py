"""Attention backends, one layer: planning, launching, running.

Pages of 64 in random order, bf16, random values; times are medians. Planning is the CPU's time for
a step, for all layers; launching is the CPU's time for one layer. The limit follows from the rates
of large copies and products, measured in the same run; `of_limit` compares only the running time.
flashinfer is also measured in its other variants: prompts without a prefix read from the pool, new
tokens after a prefix with and without splitting contexts, decoding without the matrix units.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

import torch

from benchmark.command import Command
from benchmark.gpu_timing import add_limits, median_ms
from benchmark.report import Report
from rigs.models.attention_cases import PagedContexts, attention_layer, queries
from sglang.benchmark.one_batch import Limits
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardBatch
from sglang.srt.mem_cache.device.state_spec import KVSpec

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
EXTEND = (
    (0, 8192), (0, 32768), (24576, 8192), (8192, 64), (32000, 64), (8192, 512), (32000, 512),
    (8192, 1024), (31000, 1024), (30000, 2048),
)  # fmt: skip
DECODE = ((1, 1024), (1, 32768), (64, 2048), (256, 256))


def make(name: str) -> AttentionBackend:
    kv = KVSpec.of_heads((0,), KV_HEADS, DIM, torch.bfloat16)
    return attention_registry.create_attention_backend(
        name,
        AttentionConfig(
            num_heads=HEADS,
            specs={kv.name: kv},
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cuda",
        ),
    )


def time_layer(
    backend: AttentionBackend, batch: ForwardBatch, made: PagedContexts
) -> dict[str, float]:
    """Milliseconds of the CPU to plan and to launch a layer, and of the GPU to run it."""
    layer = attention_layer(HEADS, KV_HEADS, DIM)
    loc = batch.out_cache_loc
    q = queries(len(loc), HEADS, DIM, torch.bfloat16, "cuda")
    k, v = made.k[loc], made.v[loc]
    plans = []
    for _ in range(9):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        backend.init_forward_metadata(batch)
        plans.append(time.perf_counter() - begun)
    inputs = AttentionInputs(q, k, v, save_kv_cache=False)
    ms = median_ms(lambda: backend.forward(inputs, layer, batch), rep=80)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        backend.forward(inputs, layer, batch)
    launch_s = (time.perf_counter() - begun) / 10
    return {"plan": statistics.median(plans) * 1e3, "launch": launch_s * 1e3, "layer": ms}


def variants(names: list[str], batch: ForwardBatch) -> list[tuple[str, AttentionBackend]]:
    """The backends, and flashinfer also in the variants that it does not choose for this batch."""
    found = [(name, make(name)) for name in names]
    if "flashinfer" not in names:
        return found
    # Imported here, because it is not installed everywhere. If it is missing, `make` has raised.
    from sglang.srt.layers.attention import flashinfer_backend

    if batch.forward_mode.is_decode():
        group, flashinfer_backend.TENSOR_CORE_GROUP = flashinfer_backend.TENSOR_CORE_GROUP, 99
        found.append(("flashinfer, no matrix units", make("flashinfer")))
        flashinfer_backend.TENSOR_CORE_GROUP = group
    elif not any(batch.extend_prefix_lens_cpu or []):
        found.append(("flashinfer, from the pool", make("flashinfer")))
        vars(found[-1][1])["attends_new_tokens_directly"] = False
    else:
        for what, tokens in (("splitting", 1 << 30), ("not splitting", 0)):
            found.append((f"flashinfer, {what}", make("flashinfer")))
            vars(found[-1][1])["short_tokens"] = tokens
    return found


def measure(
    report: Report, names: list[str], what: str, made: PagedContexts, batch: ForwardBatch,
    least_s: float,
) -> None:  # fmt: skip
    for name, backend in variants(names, batch):
        case = {"what": what, "backend": name}
        try:
            times = time_layer(backend, batch, made)
        except Exception as error:  # noqa: BLE001 - a failure is a result too
            report.add("fails", True, "yes or no", case, error=" ".join(str(error).split())[:300])
            continue
        report.add_all("ms", times, case)
        report.add("of_limit", least_s * 1e3 / times["layer"], "ratio", case)


def extend(report: Report, names: list[str], limits: Limits) -> None:
    for prefix, new in EXTEND:
        made = PagedContexts(
            [prefix + new], KV_HEADS, DIM, page_size=PAGE, dtype=torch.bfloat16, device="cuda"
        )
        flops = 4 * HEADS * DIM * (new * prefix + new * (new + 1) / 2)
        kv_bytes = 4 * KV_HEADS * DIM * (prefix + new)
        least = max(flops / limits.product_flop_per_s, kv_bytes / limits.copy_bytes_per_s)
        measure(report, names, f"{new} after {prefix}", made, made.extend_batch([prefix]), least)


def decode(report: Report, names: list[str], limits: Limits) -> None:
    for count, context in DECODE:
        made = PagedContexts(
            [context] * count, KV_HEADS, DIM, page_size=PAGE, dtype=torch.bfloat16, device="cuda"
        )
        least = 4 * KV_HEADS * DIM * count * context / limits.copy_bytes_per_s
        measure(report, names, f"decode {count} x {context}", made, made.decode_batch(), least)


PARTS = {"extend": extend, "decode": decode}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", default=["triton", "flashinfer"])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))


def run(args: argparse.Namespace, report: Report) -> None:
    limits = add_limits(report)
    with torch.inference_mode():
        for part in args.only:
            PARTS[part](report, args.backends, limits)


COMMAND: Final = Command(
    run=run, add_options=add_options, devices=("cuda",), quick={"only": ["decode"]}
)

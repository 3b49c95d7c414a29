"""Attention backends on a GPU, one layer of Qwen3-8B's shape: planning, launching, running.

    python benchmark/gpu_attention.py [--backends triton flashinfer] [--only extend] [--json FILE]

Pages of 64 in random order, bf16, random values; times are medians. Planning is the CPU's time for
a step, for all layers; launching is the CPU's time for one layer. The limit follows from the rates
of large copies and products, measured in the same run; `of_limit` compares only the running time.
flashinfer is also measured in its other variants: prompts without a prefix read from the pool, new
tokens after a prefix with and without splitting contexts, decoding without the matrix units.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from rigs.models.attention_cases import PagedContexts, attention_layer, queries
from sglang.benchmark.device_limits import Limits, measure_limits
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import ForwardBatch
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
    ms = do_bench(
        lambda: backend.forward(q, k, v, layer, batch, save_kv_cache=False),
        warmup=15,
        rep=80,
        return_mode="median",
    )
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        backend.forward(q, k, v, layer, batch, save_kv_cache=False)
    launch_s = (time.perf_counter() - begun) / 10
    return {
        "plan_ms": round(statistics.median(plans) * 1e3, 3),
        "launch_ms": round(launch_s * 1e3, 3),
        "ms": round(float(ms), 4),
    }


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


def report(table: list[dict[str, Any]], row: dict[str, Any]) -> None:
    table.append(row)
    print(json.dumps(row), flush=True)


def measure(
    table: list[dict[str, Any]],
    names: list[str],
    what: str,
    made: PagedContexts,
    batch: ForwardBatch,
    least_s: float,
) -> None:
    for name, backend in variants(names, batch):
        row: dict[str, Any] = {"what": what, "backend": name}
        try:
            row |= time_layer(backend, batch, made)
            row["of_limit"] = round(least_s * 1e3 / row["ms"], 3)
        except Exception as error:  # noqa: BLE001 - a failure is a result too
            row["error"] = " ".join(str(error).split())[:300]
        report(table, row)


def extend(table: list[dict[str, Any]], names: list[str], limits: Limits) -> None:
    for prefix, new in EXTEND:
        made = PagedContexts(
            [prefix + new], KV_HEADS, DIM, page_size=PAGE, dtype=torch.bfloat16, device="cuda"
        )
        flops = 4 * HEADS * DIM * (new * prefix + new * (new + 1) / 2)
        kv_bytes = 4 * KV_HEADS * DIM * (prefix + new)
        least = max(flops / limits.product_flop_per_s, kv_bytes / limits.copy_bytes_per_s)
        measure(table, names, f"{new} after {prefix}", made, made.extend_batch([prefix]), least)


def decode(table: list[dict[str, Any]], names: list[str], limits: Limits) -> None:
    for count, context in DECODE:
        made = PagedContexts(
            [context] * count, KV_HEADS, DIM, page_size=PAGE, dtype=torch.bfloat16, device="cuda"
        )
        least = 4 * KV_HEADS * DIM * count * context / limits.copy_bytes_per_s
        measure(table, names, f"decode {count} x {context}", made, made.decode_batch(), least)


PARTS = {"extend": extend, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backends", nargs="+", default=["triton", "flashinfer"])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    limits = measure_limits("cuda", torch.bfloat16)
    report(
        table,
        {
            "device": torch.cuda.get_device_name(),
            "copy_tb_s": round(limits.copy_bytes_per_s / 1e12, 3),
            "matmul_tflop_s": round(limits.product_flop_per_s / 1e12, 1),
        },
    )
    with torch.inference_mode():
        for part in args.only:
            PARTS[part](table, args.backends, limits)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


if __name__ == "__main__":
    main()

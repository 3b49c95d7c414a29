"""One sum over ranks and the norm after it, in a CUDA graph of many.

Microseconds of the norm alone, and with the sum by NCCL, by torch's kernel on symmetric memory
(copied there before; above its limit NCCL's), and in the norm's own kernel.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmark.command import Command, Refused
from benchmark.gpu_timing import graph_us
from benchmark.report import Report
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import get_attention_tp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.placement import TensorPlacement

WIDTH: Final = 4096
"""Elements of a hidden state of Qwen3-8B."""
SUM_ROWS: Final = (1, 4, 16, 32, 64, 128, 256, 1024, 8192)
EXPECTED_US: Final = {
    ("by_nccl", 1): 11.0, ("by_nccl", 64): 15.0, ("by_nccl", 8192): 330.0,
    ("in_norm", 1): 4.0, ("in_norm", 64): 5.5, ("in_norm", 8192): 185.0,
}  # fmt: skip
"""Microseconds expected for two ranks, by way and rows."""


def measure_sums() -> list[dict[str, Any]]:
    """One rank's part. The first process's rows count."""
    group = get_attention_tp_group()
    norm = RMSNorm(WIDTH, 1e-6, placement=TensorPlacement(dtype=torch.bfloat16, device="cuda"))
    found = []
    for count in SUM_ROWS:
        x = torch.randn(count, WIDTH, device="cuda", dtype=torch.bfloat16)
        residual = torch.zeros_like(x)
        group.all_reduce(x.clone())

        def by_nccl(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            dist.all_reduce(x, group=group.device_group)
            norm.add_(x, residual)

        def by_one_shot(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            norm.add_(group.all_reduce(x), residual)

        def in_norm(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            norm.add_(group.sum_later(group.empty_part(x.shape, x)), residual)

        def norm_alone(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            norm.add_(x, residual)

        row: dict[str, Any] = {"rows": count}
        for run in (norm_alone, by_nccl, by_one_shot, in_norm):
            row[run.__name__] = graph_us(run)
        found.append(row)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)


def run(args: argparse.Namespace, report: Report) -> None:
    if args.ranks > torch.accelerator.device_count():
        raise Refused(f"--ranks {args.ranks}: a GPU for each")
    for row in run_ranks(args.ranks, measure_sums, device="cuda")[0]:
        count = row.pop("rows")
        for way, us in row.items():
            expected = EXPECTED_US.get((way, count))
            report.add(way, us, "us", {"ranks": args.ranks, "rows": count}, expected=expected)


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",), gpus=2)

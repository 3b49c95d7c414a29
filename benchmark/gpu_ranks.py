"""Several GPUs of one machine: sums over ranks, and Qwen3-8B's shape by tensor and context
parallelism, against one GPU in the same run.

    python benchmark/gpu_ranks.py sums [--ranks 2] [--json FILE]
    python benchmark/gpu_ranks.py forward [--sizes 1x1 2x1 2x2] [--json FILE]

`sums`: microseconds of one sum and the norm after it, captured in a CUDA graph of many: the norm
alone, and with the sum by NCCL, by torch's kernel on symmetric memory (copied there before; above
its limit NCCL's), and in the norm's own kernel. `forward`: a size is RANKSxCP, one process per
rank; decode steps and prefills, with dummy weights. Each line has the figure expected before the
measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from gpu_forward import Rig

from rigs.schedulers.rank_processes import run_ranks
from sglang.benchmark.report import emit, provenance
from sglang.srt.distributed.parallel_state import (
    get_attention_cp_group,
    get_attention_tp_group,
    get_world_group,
)
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.model_executor.graph_capture import GraphCapture

PER_GRAPH: Final = 64
REPEATS: Final = 9
WIDTH: Final = 4096
"""Elements of a hidden state of Qwen3-8B."""
SUM_ROWS: Final = (1, 4, 16, 32, 64, 128, 256, 1024, 8192)
EXPECTED_SUM_US: Final = {
    "by_nccl": {"1": 11.0, "64": 15.0, "8192": 330.0},
    "in_norm": {"1": 4.0, "64": 5.5, "8192": 185.0},
}
DECODES: Final = {(1, 1024): 1.55, (64, 2048): 1.7}
"""Requests and context, to the speed-up that two ranks of TP must reach."""
PREFILLS: Final = {8192: 1.75, 32768: 1.8}
POOL_TOKENS: Final = 163_840


def graph_us(run: Callable[[], object]) -> float:
    """Microseconds of one `run`, of `PER_GRAPH` in a graph."""

    def many() -> None:
        for _ in range(PER_GRAPH):
            run()

    with torch.inference_mode():
        graph = GraphCapture().capture(many)
        seconds = []
        for _ in range(REPEATS + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:]) / PER_GRAPH * 1e6


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

        row: dict[str, Any] = {"rows": count, "bytes": x.nbytes}
        for run in (norm_alone, by_nccl, by_one_shot, in_norm):
            row[f"{run.__name__}_us"] = round(graph_us(run), 2)
        found.append(row)
    return found


def measure_forward(decodes: list[tuple[int, int]], prefills: list[int]) -> dict[str, Any]:
    """One rank's part: milliseconds."""
    tp, cp, rank = get_attention_tp_group(), get_attention_cp_group(), get_world_group().rank
    rig = Rig(64, POOL_TOKENS, gpu_id=rank, tp_group=tp, cp_group=cp)
    found: dict[str, Any] = {"weight_gib": rig.runner.weight_bytes() / 2**30}
    for count, context in decodes:
        rig.lay_out(count, context + 64)
        found[f"decode {count} x {context}"], _ = rig.decode_steps(count, context, 64)
    for new in prefills:
        rig.lay_out(1, new)
        batch = rig.extend(0, new)
        seconds = []
        for _ in range(4):
            time.sleep(0.5)
            get_world_group().broadcast_on_cpu(torch.zeros(1))
            seconds.append(rig.seconds(batch))
        found[f"prefill {new}"] = sorted(seconds[1:])[1] * 1e3
    return found


def sums(args: argparse.Namespace) -> None:
    for row in run_ranks(args.ranks, measure_sums, device="cuda")[0]:
        record = {"benchmark": "gpu_sums", "ranks": args.ranks, **row}
        emit(record | {"expected_us": EXPECTED_SUM_US, **provenance()}, args.json)


def forward(args: argparse.Namespace) -> None:
    whole: dict[str, float] = {}
    wanted = {f"decode {n} x {context}": least for (n, context), least in DECODES.items()}
    wanted |= {f"prefill {new}": least for new, least in PREFILLS.items()}
    for size in args.sizes:
        ranks, cp = map(int, size.split("x"))
        work = list(DECODES), list(PREFILLS)
        found = run_ranks(ranks, measure_forward, *work, attn_cp_size=cp, device="cuda")
        slowest = {name: max(one[name] for one in found) for name in found[0]}
        whole = whole or slowest
        for name, ms in slowest.items():
            record = {"benchmark": "gpu_ranks", "ranks": ranks, "attn_cp_size": cp, "what": name}
            record |= {"value": round(ms, 3), "times_one": round(whole[name] / ms, 3)}
            emit(record | {"target_of_two": wanted.get(name), **provenance()}, args.json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("sums")
    one.add_argument("--ranks", type=int, default=2)
    one.set_defaults(run=sums)
    two = commands.add_parser("forward")
    two.add_argument("--sizes", nargs="+", default=["1x1", "2x1", "2x2"])
    two.set_defaults(run=forward)
    for command in (one, two):
        command.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

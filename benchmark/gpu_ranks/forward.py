"""Decode steps and prefills by tensor and context parallelism, against one GPU in the same run.

Qwen3-8B's shape with dummy weights. A size is RANKSxCP, one process per rank; figures of the
slowest rank.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import torch

from benchmark.command import Command, Refused
from benchmark.gpu_model import POOL_TOKENS, GpuModel
from benchmark.report import Report
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import (
    get_attention_cp_group,
    get_attention_tp_group,
    get_world_group,
)

DECODES: Final = {(1, 1024): 1.55, (64, 2048): 1.7}
"""Requests and context, to the speed-up that two ranks of TP must reach."""
PREFILLS: Final = {8192: 1.75, 32768: 1.8}


def measure_forward(decodes: list[tuple[int, int]], prefills: list[int]) -> dict[str, Any]:
    """One rank's part: milliseconds."""
    tp, cp, rank = get_attention_tp_group(), get_attention_cp_group(), get_world_group().rank
    model = GpuModel(64, POOL_TOKENS, gpu_id=rank, tp_group=tp, cp_group=cp)
    found: dict[str, Any] = {"weight_gib": model.runner.weight_bytes() / 2**30}
    for count, context in decodes:
        model.lay_out(count, context + 64)
        found[f"decode {count} x {context}"], _ = model.decode_steps(count, context, 64)
    for new in prefills:
        model.lay_out(1, new)
        batch = model.extend(0, new)
        seconds = []
        for _ in range(4):
            time.sleep(0.5)
            get_world_group().broadcast_on_cpu(torch.zeros(1))
            seconds.append(model.seconds(batch))
        found[f"prefill {new}"] = sorted(seconds[1:])[1] * 1e3
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=["1x1", "2x1", "2x2"])


def run(args: argparse.Namespace, report: Report) -> None:
    whole: dict[str, float] = {}
    wanted = {f"decode {n} x {context}": least for (n, context), least in DECODES.items()}
    wanted |= {f"prefill {new}": least for new, least in PREFILLS.items()}
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    if max(ranks for ranks, _ in sizes) > torch.accelerator.device_count():
        raise Refused("--sizes: a GPU for each rank")
    for ranks, cp in sizes:
        work = list(DECODES), list(PREFILLS)
        found = run_ranks(ranks, measure_forward, *work, attn_cp_size=cp, device="cuda")
        slowest = {name: max(one[name] for one in found) for name in found[0]}
        whole = whole or slowest
        case = {"ranks": ranks, "attn_cp_size": cp}
        report.add("weights", slowest.pop("weight_gib"), "GiB", case)
        for name, ms in slowest.items():
            report.add(name, ms, "ms", case)
            target = f"at least {wanted[name]:g} with two ranks"
            report.add(f"{name}, speed-up", whole[name] / ms, "ratio", case, target=target)


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",), gpus=2)

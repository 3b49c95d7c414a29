"""TTFT cold and from L2 over HTTP, with one and two ranks.

Qwen3-8B's shape with dummy weights. Servers start together; only one works at a time. The target
for L2 is 0.6 of one rank's time, because each rank loads its share over a link of its own.
`--device cpu`: the same on a CPU with a small model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

from benchmark.command import Command
from benchmark.gpu_ranks.scale import Scale, model_and_scale
from benchmark.report import Report
from benchmark.servers import ask, started
from rigs.servers.engine_server import EngineServer

EXPECTED: Final = {8192: 0.63, 32768: 0.58}
"""Expected shares of one rank's time from L2, whose loads take 22 and 88 ms of 30 and 106."""
_LANDS_S: Final = 0.3
"""Seconds within which copies to L2 land."""


def measure(model: str, scale: Scale, report: Report) -> None:
    servers = {
        f"TP {size}": EngineServer(
            *scale.flags, "--tp-size", str(size), "--max-total-tokens", str(scale.small_l1),
            "--enable-hierarchical-cache", "--hicache-size", str(scale.l2_gb["ttft"] / size),
            model=model,
        )
        for size in (1, 2)
    }  # fmt: skip
    ms: dict[tuple[str, int, str], list[float]] = {}
    with started(servers, report):
        for name, server in servers.items():
            warm = [scale.prompt(seed, min(scale.prompts) // 4) for seed in (1, 2, 1)]
            ask(server, warm, 4)
            for length, count in scale.prompts.items():
                prompts = [scale.prompt(length + i, length) for i in range(count)]
                for turn, source in enumerate(("cold", "L2", "L2")):
                    results = ask(server, prompts, 2)
                    found = [one.ttft * 1e3 for one in results]
                    ms.setdefault((name, length, source), []).extend(found)
                    case = {"server": name, "tokens": length, "from": source, "turn": turn}
                    report.add("ttft", statistics.median(found), "ms", case, raw=found,
                               cached=results[-1].cached_details)  # fmt: skip
                    time.sleep(_LANDS_S)
    for length in scale.prompts:
        for source in ("cold", "L2"):
            one, two = (statistics.median(ms[f"TP {n}", length, source]) for n in (1, 2))
            is_l2 = source == "L2"
            case = {"server": "TP 2 over TP 1", "tokens": length, "from": source}
            report.add("ttft_ratio", two / one, "ratio", case,
                       target="at most 0.6" if is_l2 else None,
                       expected=EXPECTED.get(length) if is_l2 else None)  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> None:
    with model_and_scale(args) as (model, scale):
        measure(model, scale, report)


COMMAND: Final = Command(run=run, devices=("cuda", "cpu"), gpus=2, quick={"device": "cpu"})

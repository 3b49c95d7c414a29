"""Cost of an L2 where nothing hits, over HTTP, with two ranks.

Qwen3-8B's shape with dummy weights. Two ranks with and without L2 get the same load in turn, random
prompts that hit nothing; the target is 2% around 1. `--device cpu`: the same on a CPU with a small
model.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmark.command import Command
from benchmark.gpu_ranks.scale import model_and_scale
from benchmark.report import Report
from benchmark.servers import compare_unused, started
from rigs.servers.engine_server import EngineServer

EXPECTED_RATIO: Final = 0.985


def run(args: argparse.Namespace, report: Report) -> None:
    with model_and_scale(args) as (model, scale):
        plain = (*scale.flags, "--tp-size", "2", "--max-total-tokens", str(scale.large_l1))
        l2 = ("--enable-hierarchical-cache", "--hicache-size", str(scale.l2_gb["unused"] / 2))
        servers = {
            "TP 2": EngineServer(*plain, model=model),
            "TP 2 + L2": EngineServer(*plain, *l2, model=model),
        }
        with started(servers, report):
            unused = scale.unused(args.repeats)
            compare_unused(servers, unused, {"TP 2 + L2": EXPECTED_RATIO}, report)


COMMAND: Final = Command(
    run=run, repeats=5, devices=("cuda", "cpu"), gpus=2, quick={"device": "cpu", "repeats": 2}
)

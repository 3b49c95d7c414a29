"""Cost of an L2 where nothing hits, over HTTP.

The load of `gpu-hicache unused`, to servers with and without L2 (target: at most 2% less).
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmark.command import Command
from benchmark.gpu_hybrid.families import STATEFUL, add_families, model_of
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import VOCABULARY, UnusedLoad, compare_unused, started
from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.servers.engine_server import EngineServer

PLAIN: Final = (
    "--device", "cuda", *DUMMY_FLAGS, "--max-total-tokens", "98304", "--page-size", "64",
    "--max-running-requests", "32",
)  # fmt: skip
L2: Final = ("--enable-hierarchical-cache", "--hicache-size", "12")


def measure_unused(family: str, model: str, rounds: int, report: Report) -> None:
    states = ("--max-mamba-cache-size", "160") if family in STATEFUL else ()
    with_l2 = f"+ L2, {family}"
    servers = {
        "GPU only": EngineServer(*PLAIN, *states, model=model),
        with_l2: EngineServer(*PLAIN, *states, *L2, model=model),
    }
    unused = UnusedLoad(
        prompt=lambda seed, length: random_prompt(seed, length, *VOCABULARY), rounds=rounds
    )
    with started(servers, report):
        compare_unused(servers, unused, {with_l2: 0.99}, report)


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family) as model:
            measure_unused(family, model, args.repeats, report)


COMMAND: Final = Command(run=run, add_options=add_families, repeats=4, devices=("cuda",))

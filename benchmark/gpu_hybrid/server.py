"""TTFT of 8,192 tokens over HTTP (32,768 of two families), cold and from L2 (target: a fifth), and
decode of one."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

from benchmark.command import Command
from benchmark.gpu_hybrid.families import (
    STATEFUL,
    add_families,
    length_of,
    model_of,
    page_of,
    prompt,
)
from benchmark.report import Report
from benchmark.servers import ask, started
from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.servers.engine_server import EngineServer

EXPECTED_OF_COLD: Final = {
    "qwen3_next": 0.2, "kimi_linear": 0.2, "deepseek_v32": 0.15, "deepseek_v4": 0.015,
}  # fmt: skip
TARGETS: Final = dict.fromkeys(("deepseek_v4", "glm5_next"), "at most 0.03")
"""Families with another target for prompts from L2 than a fifth."""


def measure_server(family: str, model: str, report: Report) -> None:
    length = length_of(family)
    flags = ["--max-total-tokens", str(2 * length + 2048), "--enable-hierarchical-cache",
             "--page-size", str(page_of(family)), "--hicache-ratio", "4",
             "--max-running-requests", "8"]  # fmt: skip
    if family in STATEFUL:
        flags += ["--max-mamba-cache-size", "32"]
    medians: dict[str, float] = {}
    server = EngineServer("--device", "cuda", *DUMMY_FLAGS, *flags, model=model)
    with started({family: server}, report):
        ask(server, [prompt(seed, 2048) for seed in (1, 2, 1)], 4)
        prompts = [prompt(100 + i, length) for i in range(4)]
        for source in ("cold", "L2", "L2 again"):
            results = ask(server, prompts, 2)
            ttft_ms = [result.ttft * 1e3 for result in results]
            medians[source] = statistics.median(ttft_ms)
            case = {"family": family, "tokens": length, "from": source}
            report.add("ttft", medians[source], "ms", case, raw=ttft_ms,
                       cached=results[-1].cached_details)  # fmt: skip
            if source != "cold":
                report.add("of_cold", medians[source] / medians["cold"], "ratio", case,
                           target=TARGETS.get(family, "at most 0.2"),
                           expected=EXPECTED_OF_COLD.get(family))  # fmt: skip
            time.sleep(0.5)  # The copies to L2 land meanwhile.
        (decoded,) = ask(server, [prompt(7, 1024)], 129)
        report.add("decode_of_one", (decoded.tpot or 0.0) * 1e3, "ms", {"family": family})


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family) as model:
            measure_server(family, model, report)


COMMAND: Final = Command(run=run, add_options=add_families, devices=("cuda",))

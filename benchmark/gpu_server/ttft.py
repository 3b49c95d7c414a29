"""TTFT cold, from L2 and from L1, and decoding of one sequence, over HTTP.

Qwen3-8B's shape with dummy weights, random prompts. `gpu-hicache` measures the benefit of the tiers
for conversations and their cost without hits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

from benchmark.command import Command
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import VOCABULARY, ask, started
from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer

EXPECTED_MS: Final = {
    (8192, "cold"): 205, (8192, "L2"): 27, (8192, "L1"): 7,
    (32768, "cold"): 1255, (32768, "L2"): 97, (32768, "L1"): 10.5,
}  # fmt: skip
TARGET_MS: Final = {(8192, "L2"): 34, (32768, "L2"): 105, (32768, "L1"): 10.5}
DECODE_TOKENS_S: Final = 205


def measure_ttft(server: EngineServer, report: Report) -> None:
    # L1 holds 40,960 tokens, so that each prompt has left L1 before it is sent again; the last one
    # is sent again at once.
    ask(server, [random_prompt(seed, 2048, *VOCABULARY) for seed in (1, 2, 1)], 4)
    for length, count in ((8192, 7), (32768, 3)):
        prompts = [random_prompt(length + i, length, *VOCABULARY) for i in range(count)]
        for turn, source in enumerate(("cold", "L2", "L2", "L1")):
            results = ask(server, prompts[-1:] * 9 if source == "L1" else prompts, 2)
            ttft_ms = [result.ttft * 1e3 for result in results]
            report.add(
                "ttft",
                statistics.median(ttft_ms),
                "ms",
                {"tokens": length, "from": source, "turn": turn},
                expected=EXPECTED_MS[length, source],
                target=TARGET_MS.get((length, source)),
                raw=ttft_ms,
                cached=results[-1].cached_details,
            )
            time.sleep(0.3)  # The copies to L2 land meanwhile.


def measure_decode(server: EngineServer, report: Report) -> None:
    results = ask(server, [random_prompt(seed, 1024, *VOCABULARY) for seed in (71, 72)], 257)
    rates = [1 / result.tpot for result in results if result.tpot]
    target = f"at least {DECODE_TOKENS_S}"
    rate = statistics.median(rates)
    report.add("decode_of_one", rate, "token/s", expected=DECODE_TOKENS_S, target=target, raw=rates)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", default="auto", help="layout of L2")


def run(args: argparse.Namespace, report: Report) -> None:
    flags = ("--max-total-tokens", "40960", "--enable-hierarchical-cache", "--hicache-size", "24",
             "--hicache-mem-layout", args.layout)  # fmt: skip
    with dummy_model() as model:
        server = EngineServer("--device", "cuda", *DUMMY_FLAGS, *flags, model=model)
        with started({"one": server}, report):
            measure_ttft(server, report)
            measure_decode(server, report)


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",))

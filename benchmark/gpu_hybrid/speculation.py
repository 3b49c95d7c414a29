"""Tokens per second with drafts and without: requests that decode together after 1,024 tokens.

Random weights draft nothing that is right, so a verification of 1 + 3 tokens accepts what
SGLANG_SIMULATE_ACC_LEN says: 2.7 tokens on average. Target: a verification takes at most 1.35 times
a plain step for one request, and 1.6 times for 16. "measured": the server itself chooses the steps.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Final

from benchmark.command import Command
from benchmark.gpu_hybrid.families import add_families, model_of, prompt
from benchmark.report import Report
from benchmark.servers import load, started
from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.servers.engine_server import EngineServer

PROMPT: Final = 1024
OUTPUT: Final = 256
ACCEPTED: Final = 2.7
"""Tokens of a verification on average."""
TARGETS: Final = {1: 1.35, 16: 1.6}
DRAFTS: Final = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3")


def measure_speculation(family: str, model: str, batches: list[int], report: Report) -> None:
    most = max(batches)
    flags = ["--max-total-tokens", str(most * (PROMPT + 2 * OUTPUT)), "--page-size", "64",
             "--max-running-requests", str(most), "--disable-radix-cache"]  # fmt: skip
    plain: dict[int, float] = {}
    for steps in ("plain", "drafts", "measured"):
        server = EngineServer(
            *("--device", "cuda", *DUMMY_FLAGS, *flags, *(() if steps == "plain" else DRAFTS)),
            model=model,
            env={
                "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED),
                "SGLANG_SPECULATE_ALWAYS": str(int(steps == "drafts")),
            },
        )
        with started({f"{family} {steps}": server}, report):
            load(server.url, [prompt(i, PROMPT) for i in range(most)], 32, concurrency=most)
            for batch in batches:
                tpot_ms = _tpot_ms(server, batch, rounds=2 if steps == "measured" else 1)
                case = {"family": family, "requests": batch, "steps": steps}
                report.add("tokens_per_second", batch * 1e3 / tpot_ms, "token/s", case)
                if steps == "plain":
                    plain[batch] = tpot_ms
                    report.add("step", tpot_ms, "ms", case)
                    continue
                if steps == "drafts":
                    step_ms, target = tpot_ms * ACCEPTED, TARGETS.get(batch)
                    report.add("step", step_ms, "ms", case)
                    report.add("verification_to_step", step_ms / plain[batch], "ratio", case,
                               target=f"at most {target}" if target else None)  # fmt: skip
                report.add("gain", plain[batch] / tpot_ms, "ratio", case)


def _tpot_ms(server: EngineServer, batch: int, rounds: int) -> float:
    """Median milliseconds for a token of a request, in the last of some rounds."""
    for number in range(rounds):
        prompts = [prompt(1000 * (batch + number) + i, PROMPT) for i in range(batch)]
        found = load(server.url, prompts, OUTPUT, concurrency=batch)
    return statistics.median((one.tpot or 0.0) * 1e3 for one in found.results)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_families(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family, drafts=True) as model:
            measure_speculation(family, model, args.batches, report)


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",))

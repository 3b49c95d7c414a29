"""Recall accuracy of a built-in model cold and from each tier, with real servers.

Multi-turn conversations: question r of all of them comes before any question r + 1, so that tiers
much smaller than the working set have evicted a conversation before its next question. A misplaced
or damaged page causes a wrong answer. Expected: the same score in every row, and cached tokens from
the tier that the row names. A hybrid's prefix is cached up to a snapshot of its recurrent states.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmark.command import Command
from benchmark.report import Report
from rigs.recall.run_eval import EvalArgs, run_eval
from rigs.servers.engine_server import EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR

MODELS = {"builtin": BUILTIN_MODEL_DIR, "hybrid": BUILTIN_HYBRID_MODEL_DIR}
SMALL_L1 = ("--max-total-tokens", "8192")
WAIT = ("--hicache-storage-prefetch-policy", "wait_complete")


@dataclass(frozen=True)
class Case:
    """A server, named after the tier that should have the prefixes of later questions."""

    name: str
    flags: tuple[str, ...]
    env: dict[str, str]


def cases(mooncake: dict[str, str], folder: str) -> list[Case]:
    """Cold, L1, L2, and L3 of both backends with evictions from the tiers above."""
    large_l2 = ("--enable-hierarchical-cache", *SMALL_L1, "--hicache-ratio", "16")
    tiny_l2 = (*SMALL_L1, "--hicache-ratio", "1", *WAIT)
    files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}
    return [
        Case("cold", ("--disable-radix-cache",), {}),
        Case("L1", ("--max-total-tokens", "131072"), {}),
        Case("L1 under eviction", SMALL_L1, {}),
        Case("L2", large_l2, {}),
        Case("L2, write_back", (*large_l2, "--hicache-write-policy", "write_back"), {}),
        Case("L3 file", (*tiny_l2, "--hicache-storage-backend", "file"), files),
        Case("L3 mooncake", (*tiny_l2, "--hicache-storage-backend", "mooncake"), mooncake),
        Case(
            "L3 mooncake, a second server",
            (*tiny_l2, "--hicache-storage-backend", "mooncake"),
            mooncake,
        ),
    ]


def measure(case: Case, args: argparse.Namespace, report: Report) -> None:
    """Score and cached tokens by tier of one case."""
    model = str(MODELS[args.model])
    with EngineServer("--enable-cache-report", *case.flags, env=case.env, model=model) as server:
        result = run_eval(
            EvalArgs(
                base_url=server.url,
                num_examples=args.num_examples,
                num_threads=4,
                num_questions=args.num_questions,
                context_tokens=args.context_tokens,
                order="round",
                cached_tokens_details=True,
            )
        )
    of = {"server": case.name, "model": args.model}
    report.add("score", result["score"], "share", of, wrong=result["wrong"])
    report.add("prompt", result["prompt_tokens"], "tokens", of)
    cached = result["cached_tokens_details"]
    report.add_all("tokens", {f"from_{tier}": count for tier, count in cached.items()}, of)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(MODELS), default="builtin")
    parser.add_argument("--num-examples", type=int, default=16)
    parser.add_argument("--num-questions", type=int, default=4)
    parser.add_argument("--context-tokens", type=int, default=2000)
    parser.add_argument("--servers", type=int, help="number of servers, from the first one")


def run(args: argparse.Namespace, report: Report) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster(segment_size="512mb"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for case in cases(cluster.engine_env(), folder)[: args.servers]:
            measure(case, args, report)


_QUICK: Final = {"num_examples": 1, "num_questions": 2, "context_tokens": 300, "servers": 2}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)

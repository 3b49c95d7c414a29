"""One prompt answered from every tier by real servers: source, time, and equality of the answer.

Expected: `equal` is true in every case; cold is slowest, L1 fastest, L2 and L3 are between them.
Times are medians of `--repeats` answers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from benchmark.command import Command
from benchmark.report import Report
from rigs.models.heldout_question import HeldoutQuestion
from rigs.servers.engine_server import Answer, EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster

WAIT = ("--hicache-storage-prefetch-policy", "wait_complete")
SMALL_L1 = ("--max-total-tokens", "16384", "--hicache-ratio", "4")


class Answers:
    """Sends the prompt, and compares the answer with the cold one."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self._args, self._report = args, report
        self._ids = HeldoutQuestion.of(1, args.context_tokens).ids
        others = (HeldoutQuestion.of(seed, args.context_tokens) for seed in range(100, 105))
        self._others = [question.ids for question in others]
        self._expected: list[int] | None = None

    def measure(
        self, name: str, server: EngineServer, before: Callable[[EngineServer], None] | None
    ) -> None:
        """Report some answers. `before` each, the tiers above are emptied."""
        answers: list[Answer] = []
        for _ in range(self._args.repeats):
            if before is not None:
                before(server)
            answers.append(server.generate(self._ids, max_new_tokens=8))
        self._expected = self._expected or answers[0].output_ids
        case = {"from": name}
        are_equal = all(answer.output_ids == self._expected for answer in answers)
        report, last = self._report, answers[-1]
        report.add("equal", are_equal, "yes or no", case, expected=True, text=last.text)
        report.add("prompt", len(self._ids), "tokens", case)
        cached = {f"from_{tier}": count for tier, count in last.cached.items()}
        report.add_all("tokens", cached, case)
        seconds = [answer.meta_info["e2e_latency"] for answer in answers]
        report.add("answer", statistics.median(seconds), "s", case, raw=seconds)

    def push_out(self, server: EngineServer) -> None:
        """Fill L1 with other prompts."""
        for ids in self._others:
            server.generate(ids, max_new_tokens=1)

    def prime(self, server: EngineServer) -> None:
        """Put the prompt into every tier."""
        server.generate(self._ids, max_new_tokens=8)


def flush(server: EngineServer) -> None:
    """Empty L1 and L2 after all pages were written to L3."""
    server.flush()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context-tokens", type=int, default=4000)
    tiers = ["L1 and L2", "L3"]
    parser.add_argument("--tiers", nargs="*", default=tiers, choices=tiers, help="beside cold")


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure each tier in turn."""
    answers = Answers(args, report)
    with EngineServer("--disable-radix-cache") as server:
        answers.prime(server)
        answers.measure("cold", server, None)
    if "L1 and L2" in args.tiers:
        with EngineServer("--enable-hierarchical-cache", *SMALL_L1) as server:
            answers.prime(server)
            answers.measure("L1", server, None)
            answers.measure("L2", server, answers.push_out)
    if "L3" in args.tiers:
        measure_storage(answers)


def measure_storage(answers: Answers) -> None:
    """The server that wrote, another one, and the first after a restart."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(MooncakeCluster(segment_size="256mb"))
        for backend, env in (
            ("file", {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}),
            ("mooncake", cluster.engine_env()),
        ):
            flags = ("--hicache-storage-backend", backend, *WAIT)
            with EngineServer(*flags, env=env) as writer:
                answers.prime(writer)
                answers.measure(f"L3 {backend}", writer, flush)
                with EngineServer(*flags, env=env) as reader:
                    answers.measure(f"L3 {backend}, another server", reader, flush)
                writer.stop()
                writer.start()
                answers.measure(f"L3 {backend}, after a restart", writer, flush)


_QUICK: Final = {"context_tokens": 300, "repeats": 1, "tiers": ["L1 and L2"]}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=5, quick=_QUICK)

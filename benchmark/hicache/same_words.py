#!/usr/bin/env python3
"""One prompt answered from every tier by real servers: source, time, and equality of the answer.

    python benchmark/hicache/same_words.py [--context-tokens 4000] [--output FILE]

Expected: `equal` is true in every line; cold is slowest, L1 fastest, L2 and L3 are between them.
Each line is the median of `--repeats` answers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rigs.models.heldout_question import HeldoutQuestion
from rigs.servers.engine_server import Answer, EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.benchmark.report import emit, provenance

WAIT = ("--hicache-storage-prefetch-policy", "wait_complete")
SMALL_L1 = ("--max-total-tokens", "16384", "--hicache-ratio", "4")


class Report:
    """Sends the prompt, compares the answer with the cold one, and prints a line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._ids = HeldoutQuestion.of(1, args.context_tokens).ids
        others = (HeldoutQuestion.of(seed, args.context_tokens) for seed in range(100, 105))
        self._others = [question.ids for question in others]
        self._expected: list[int] | None = None

    def line(
        self, name: str, server: EngineServer, before: Callable[[EngineServer], None] | None
    ) -> None:
        """Print the median of some answers. `before` each, the tiers above are emptied."""
        answers: list[Answer] = []
        for _ in range(self._args.repeats):
            if before is not None:
                before(server)
            answers.append(server.generate(self._ids, max_new_tokens=8))
        self._expected = self._expected or answers[0].output_ids
        record: dict[str, Any] = {
            "from": name,
            "prompt_tokens": len(self._ids),
            "cached_tokens_details": answers[-1].cached,
            "equal": all(answer.output_ids == self._expected for answer in answers),
            "text": answers[-1].text,
            "e2e_seconds": statistics.median(a.meta_info["e2e_latency"] for a in answers),
        }
        emit(record, self._args.output)

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


def main() -> None:
    """Measure each tier in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context-tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    emit(provenance(), args.output)
    report = Report(args)
    with EngineServer("--disable-radix-cache") as server:
        report.prime(server)
        report.line("cold", server, None)
    with EngineServer("--enable-hierarchical-cache", *SMALL_L1) as server:
        report.prime(server)
        report.line("L1", server, None)
        report.line("L2", server, report.push_out)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(MooncakeCluster(segment_size="256mb"))
        for backend, env in (
            ("file", {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}),
            ("mooncake", cluster.engine_env()),
        ):
            flags = ("--hicache-storage-backend", backend, *WAIT)
            with EngineServer(*flags, env=env) as writer:
                report.prime(writer)
                report.line(f"L3 {backend}", writer, flush)
                with EngineServer(*flags, env=env) as reader:
                    report.line(f"L3 {backend}, another server", reader, flush)
                writer.stop()
                writer.start()
                report.line(f"L3 {backend}, after a restart", writer, flush)


if __name__ == "__main__":
    main()

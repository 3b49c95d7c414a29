"""All speed targets on a CPU; each figure is a ratio from one run.

A missed target does not change the exit status, which is 0 unless a measurement failed. About ten
minutes on 2 cores. Uses real servers, a real Mooncake store, and transformers in a process of its
own. `--quick` makes fewer rounds, for a rough impression.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from benchmark.command import Command
from benchmark.cpu_targets import first_token, memory, micro, throughput
from benchmark.cpu_targets.rows import Row
from benchmark.report import Report

ROWS: Final = (
    Row(
        "cold", "TTFT over HTTP of a cold prompt of 4,000 tokens against transformers' prefill",
        "1.0: the same matmuls, chunks of 2,048 attend to less, HTTP adds 5 ms",
        first_token.cold,
    ),
    Row(
        "hits", "TTFT of the same prompt from L2 and from L3 over TCP, against cold",
        "L2 0.1, L3 0.15: 4 MB to move, 32 tokens to compute",
        first_token.hits,
    ),
    Row(
        "batch", "16 requests at once (256 in, 64 out) against transformers.generate, one by one",
        "1.5 and 6", throughput.batch,
    ),
    Row(
        "scheduler", "scheduler time a decode step at 16 running, without the forward",
        "0.4 ms", micro.scheduler_step,
    ),
    Row(
        "http", "requests a second of a dummy model, one token, against a bare FastAPI echo",
        "0.25: three processes share two cores with the client", micro.http_path,
    ),
    Row(
        "transfers", "puts and gets through the Mooncake backend against a bare loop",
        "1.0 in place; 0.5 staged: another copy of each byte",
        micro.mooncake_transfers,
    ),
    Row(
        "unused", "throughput with L2 and L3 without any hits, against without them",
        "3% less", throughput.unused_tiers,
    ),
    Row(
        "memory", "resident memory of all processes after 10,000 requests against after 1,000",
        "+ 10 MB", memory.growth,
    ),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names)


def run(args: argparse.Namespace, report: Report) -> None:
    for row in ROWS:
        if row.name not in args.rows:
            continue
        started = time.perf_counter()
        outcome = row.measure(args.quick)
        case = {"row": row.name, "what": row.what}
        for figure in outcome.figures:
            report.add(
                figure.name,
                figure.value,
                figure.unit,
                case,
                expected=row.expected,
                target=f"{figure.better} {figure.target:g}",
                is_met=figure.is_met,
            )
        report.add("duration", time.perf_counter() - started, "s", case, **outcome.details)


COMMAND: Final = Command(run=run, add_options=add_options)

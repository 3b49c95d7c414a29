"""Measures all speed targets on a CPU; each figure is a ratio from one run.

    python benchmark/cpu_targets.py [--rows cold hits ...] [--quick] [--output-file targets.jsonl]

Prints JSON lines: for each row first its target and the figure expected before the measurement,
then the measured figures with date, command, commit and hardware. A missed target does not change
the exit status, which is 0 unless a measurement failed. About ten minutes on 2 cores. Uses real
servers, a real Mooncake store, and transformers in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import time

from cpu import first_token, memory, micro, throughput
from cpu.rows import Row
from tqdm import tqdm

from sglang.benchmark.report import emit, provenance, writable_file

ROWS = (
    Row(
        "cold", "TTFT over HTTP of a cold prompt of 4,000 tokens against transformers' prefill",
        "<= 1.3", "1.0: the same matmuls, chunks of 2,048 attend to less, HTTP adds 5 ms",
        first_token.cold,
    ),
    Row(
        "hits", "TTFT of the same prompt from L2 and from L3 over TCP, against cold",
        "L2 <= 0.12, L3 <= 0.20", "L2 0.1, L3 0.15: 4 MB to move, 32 tokens to compute",
        first_token.hits,
    ),
    Row(
        "batch", "16 requests at once (256 in, 64 out) against transformers.generate, one by one",
        ">= 1.0, >= 4", "1.5 and 6", throughput.batch,
    ),
    Row(
        "scheduler", "scheduler time a decode step at 16 running, without the forward",
        "<= 1 ms", "0.4 ms", micro.scheduler_step,
    ),
    Row(
        "http", "requests a second of a dummy model, one token, against a bare FastAPI echo",
        ">= 0.25", "0.25: three processes share two cores with the client", micro.http_path,
    ),
    Row(
        "transfers", "puts and gets through the Mooncake backend against a bare loop",
        ">= 0.9 with checksums off", "1.0 in place; 0.5 staged: another copy of each byte",
        micro.mooncake_transfers,
    ),
    Row(
        "unused", "throughput with L2 and L3 without any hits, against without them",
        "<= 5% less", "3% less", throughput.unused_tiers,
    ),
    Row(
        "memory", "resident memory of all processes after 10,000 requests against after 1,000",
        "<= + 20 MB", "+ 10 MB", memory.growth,
    ),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a rough impression")
    parser.add_argument("--output-file", type=writable_file, help="also append the JSON lines here")
    parser.add_argument("--disable-tqdm", action="store_true")
    args = parser.parse_args(argv)
    about = provenance()
    rows = [row for row in ROWS if row.name in args.rows]
    bar = tqdm(rows, unit="row", disable=args.disable_tqdm or None)
    for row in bar:
        bar.set_description(row.name)
        head = {"benchmark": "cpu_targets", "row": row.name}
        announced = {"what": row.what, "target": row.target, "expected": row.expected}
        emit(head | announced | {"quick": args.quick}, args.output_file)
        started = time.perf_counter()
        outcome = row.measure(args.quick)
        emit(
            {
                **head,
                **about,
                "figures": [figure.as_record() for figure in outcome.figures],
                "seconds": round(time.perf_counter() - started, 1),
                "details": outcome.details,
            },
            args.output_file,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

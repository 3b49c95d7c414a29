"""Rows that micro benchmarks measure: each runs one and takes its figures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
from cpu.rows import Figure, Outcome

_BENCHMARKS = Path(__file__).resolve().parent.parent


def run_benchmark(script: str, *flags: str) -> list[dict[str, Any]]:
    """The JSON lines of a benchmark in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        subprocess.run(
            [sys.executable, str(_BENCHMARKS / script), *flags, "--output-file", str(lines)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [orjson.loads(line) for line in lines.read_bytes().splitlines()]


def scheduler_step(quick: bool) -> Outcome:
    """Each arrangement's median; the slowest is the figure."""
    records = run_benchmark("micro/bench_scheduler_step.py", "--steps", "50" if quick else "200")
    details = {
        f"page {one['page_size']}{', hierarchical' if one['hierarchical_cache'] else ''}": {
            key: one[key] for key in ("scheduler_ms", "scheduler_p99_ms", "forward_ms")
        }
        for one in records
    }
    slowest = max(one["scheduler_ms"] for one in records)
    return Outcome([Figure("ms a decode step at 16 running", slowest, 1.0, "at most")], details)


def http_path(quick: bool) -> Outcome:
    """Requests per second, compared with the echo server's."""
    flags = ("--repeat", "2", "--seconds", "2") if quick else ("--repeat", "5")
    (record,) = run_benchmark("micro/bench_http_path.py", *flags)
    keys = ("echo_req_s", "engine_req_s", "concurrency", "cpu_us_per_request", "raw")
    figure = Figure("requests a second over the echo's", record["ratio"], 0.25, "at least")
    return Outcome([figure], {key: record[key] for key in keys})


def mooncake_transfers(quick: bool) -> Outcome:
    """Puts and gets, checksums off (the target) and on, for a staged and an in-place layout."""
    flags = ("--mib", "128", "--repeat", "3") if quick else ("--mib", "256", "--repeat", "15")
    records = run_benchmark(
        "hicache/bench_storage.py", "--backends", "mooncake", "--disable-tqdm",
        "--layouts", "page_first_direct", "layer_first", "--page-sizes", "64", *flags,
    )  # fmt: skip
    figures = [
        Figure(f"{way}, {one['layout']}, checksum {state}, over the bare loop",
               one[f"{way}_checksum_{state}_to_bare"], 0.9, "at least")
        for one in records
        for way in ("put", "get")
        for state in ("off", "on")
    ]  # fmt: skip
    details = {
        one["layout"]: {key: value for key, value in one.items() if key.endswith("_gb_s")}
        for one in records
    }
    return Outcome(figures, details)

"""Rows that other measurements have: each runs one and takes its figures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from benchmark.cpu_targets.rows import Figure, Outcome

_ROOT = Path(__file__).resolve().parents[2]
Cases: TypeAlias = dict[str, dict[str, Any]]


def measured(*words: str) -> Cases:
    """Run a measurement in a separate process; return its figures by case and metric."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        subprocess.run(
            [sys.executable, "-m", "benchmark", *words, "--output-file", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=_ROOT,
        )
        found: Cases = {}
        for line in map(msgspec.json.decode, path.read_bytes().splitlines()):
            case = ", ".join(f"{name} {value}" for name, value in line["case"].items())
            found.setdefault(case, {})[line["metric"]] = line["value"]
        return found


def scheduler_step(quick: bool) -> Outcome:
    """Each arrangement's median; the slowest is the figure."""
    found = measured("cpu-costs", "scheduler", "--steps", "50" if quick else "200")
    slowest = max(one["scheduler"] for one in found.values())
    figure = Figure("decode step at 16 running", slowest, 1.0, "at most", "ms")
    return Outcome([figure], dict(found))


def http_path(quick: bool) -> Outcome:
    """Requests per second, compared with the echo server's."""
    rounds = ("--repeats", "2", "--seconds", "2") if quick else ("--repeats", "5")
    found = measured("cpu-costs", "http-path", *rounds)
    ratio = found[""]["engine_to_echo"]
    figure = Figure("requests a second over the echo's", ratio, 0.25, "at least")
    return Outcome([figure], {case or "speeds": one for case, one in found.items()})


def mooncake_transfers(quick: bool) -> Outcome:
    """Puts and gets, checksums off (the target) and on, for a staged and an in-place layout."""
    rounds = ("--mib", "128", "--repeats", "3") if quick else ("--mib", "256", "--repeats", "15")
    layouts = ("page_first_direct", "layer_first")
    found = measured(
        *("storage", "backends", "--backends", "mooncake", "--page-sizes", "64"),
        *("--layouts", *layouts, *rounds),
    )
    figures = [
        Figure(
            f"{way}, {layout}, checksum {state}, over the bare loop",
            one[f"{way}_checksum_{state}_to_bare"],
            0.9,
            "at least",
        )
        for layout, one in zip(layouts, found.values(), strict=True)
        for way in ("put", "get")
        for state in ("off", "on")
    ]
    return Outcome(figures, dict(found))

"""Plots the results of `gpu_hicache.py turns`: throughput, TTFT by round, cached tokens by tier.

    python benchmark/hicache/plot_gpu_hicache.py RESULTS.jsonl PLOT.png

Separate from the benchmark, because a GPU host may lack matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import orjson
from matplotlib import pyplot

from sglang.benchmark.request_result import TIERS

_PREFIX = "conversations, "
_ORDER = ("GPU only", "+ L2", "+ Mooncake", "pre-populated")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each configuration. Raises ValueError if one is missing."""
    found = {}
    for line in path.read_bytes().splitlines():
        record = orjson.loads(line)
        if str(record.get("what", "")).startswith(_PREFIX):
            found[record["what"].removeprefix(_PREFIX)] = record
    missing = [name for name in _ORDER if name not in found]
    if missing:
        raise ValueError(f"{path}: no conversations with {', '.join(missing)}")
    return {name: found[name] for name in _ORDER}


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the plot to `path` (PNG)."""
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.8))
    names = list(records)
    bars = left.bar(names, [one["input_tokens_per_s"] / 1e3 for one in records.values()])
    left.bar_label(bars, fmt="%.0f")
    left.margins(y=0.1)
    left.set_ylabel("input throughput (thousand token/s)")
    for name, one in records.items():
        rounds = one["rounds"]
        middle.plot(
            [turn["round"] for turn in rounds],
            [turn["median_ttft_ms"] for turn in rounds],
            "o-",
            label=name,
        )
    middle.set_xlabel("round")
    middle.set_ylabel("median TTFT (ms)")
    middle.set_ylim(bottom=0)
    middle.legend(fontsize=8)
    below = [0.0] * len(names)
    for tier in TIERS:
        shares = [one["cached"][tier] / one["prompt_tokens"] for one in records.values()]
        right.bar(names, shares, bottom=below, label=tier)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    right.set_ylabel("cached share of the prompts")
    right.set_ylim(0, 1)
    right.legend(fontsize=8)
    for panel in (left, right):
        panel.tick_params(axis="x", rotation=15, labelsize=8)
    for panel in (left, middle, right):
        panel.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> int:
    if len(sys.argv) != 3:
        print((__doc__ or "").splitlines()[2].strip(), file=sys.stderr)
        return 2
    try:
        draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        print(f"plot_gpu_hicache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

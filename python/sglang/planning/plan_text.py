"""A plan of a server's cache, and its tables."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from sglang.planning.model_costs import ModelParameters
from sglang.planning.tiers import PoolCost, ReadOrCompute, Tier
from sglang.srt.constants import GB
from sglang.srt.model_executor.pool_sizing import memory_text

WIDTH: Final = 100
"""Most characters of a line, except for that of the flags, which is to be copied."""
RANKS: Final = (1, 2, 4, 8, 16, 32)
"""Values of `--tp-size` in the table of weights."""
_MACHINE_ROWS: Final = {
    # Field of `Machine`: its title, and the unit in which it is shown.
    "device_bytes": ("device memory, GB", GB),
    "host_bytes": ("host memory for the engine, GB", GB),
    "l2_bytes_per_s": ("copies from host memory, GB/s a rank", GB),
    "l3_bytes_per_s": ("reads from the store, GB/s a rank", GB),
    "flop_per_s": ("large product, TFLOP/s", 1e12),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All figures, which `--json` prints."""

    model: str
    architecture: str
    machine: dict[str, Any]
    tp_size: int
    page_size: int
    parameters: ModelParameters
    weight_bytes: int
    """Bytes of a rank's weights."""
    weights: list[dict[str, Any]]
    """`weight_bytes` by format and `--tp-size`."""
    pools: list[PoolCost]
    memory: dict[str, int]
    """Bytes of a rank's device memory by part; see `memory_parts`."""
    tiers: list[Tier]
    reads: ReadOrCompute
    flags: list[str]
    notes: list[str]
    trace: dict[str, Any] | None = None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first on the left and the others on the right. The last
    column is wrapped, and on the left, if the table would be wider than `WIDTH`."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    room = WIDTH - sum(widths[:-1]) - 2 * len(widths)
    on_the_left = {0} if widths[-1] <= room else {0, len(head) - 1}
    widths[-1] = min(widths[-1], room)
    wrapped = []
    for row in (head, *rows):
        first, *more = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
        wrapped.append([*row[:-1], first])
        wrapped += [[*[""] * (len(row) - 1), part] for part in more]
    lines = []
    for row in wrapped:
        cells = [
            cell.ljust(width) if i in on_the_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _gb(size: float | None) -> str:
    if size is None:
        return "-"
    if math.isinf(size):
        return "no limit"
    # Sizes of small models would be 0.00.
    return f"{size / GB:,.2f}" if size >= GB / 10 or not size else f"{size / GB:.2g}"


def _count(number: float) -> str:
    return "no limit" if math.isinf(number) else f"{int(number):,}"


def weights_text(plan_weights: Sequence[dict[str, Any]]) -> str:
    head = ["weights of a rank, GB, by --tp-size", *map(str, RANKS)]
    rows = [[row["format"], *(_gb(row["bytes"][ranks]) for ranks in RANKS)] for row in plan_weights]
    return _table(head, rows)


def _parameters(count: float) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"


def to_text(plan: Plan) -> str:
    """The plan as tables."""
    machine, reads = plan.machine, plan.reads
    blocks = [
        _wrapped(
            f"{plan.model}: {plan.architecture}, {_parameters(plan.parameters.total)} "
            f"parameters, {_parameters(plan.parameters.active)} for each token; --tp-size "
            f"{plan.tp_size}, pages of {plan.page_size} tokens"
        ),
        f"{machine['name']} ({machine['kind']})\n"
        + _table(
            ["machine", "", "source"],
            [
                [title, f"{machine[field]['value'] / unit:,.1f}", machine[field]["source"]]
                for field, (title, unit) in _MACHINE_ROWS.items()
            ],
        ),
        weights_text(plan.weights),
        _table(
            ["pool", "one", "layers", "dtype", "bytes, L1 and L2, a rank", "bytes, L3, all ranks"],
            [
                [
                    p.name,
                    p.item,
                    str(p.layers),
                    p.dtype,
                    f"{p.rank_bytes:,}",
                    f"{p.store_bytes:,.1f}",
                ]
                for p in plan.pools
            ],
        ),
        _wrapped(f"memory of a rank: {memory_text(plan.memory)}"),
        _table(
            ["tier", "GB", "tokens", "states", "why"],
            [
                [t.name, _gb(t.rank_bytes), _count(t.tokens), f"{t.states:,}", t.reason]
                for t in plan.tiers
            ],
        ),
        _table(
            ["prefix, tokens", "compute, s", "from L2, s", "from L3, s"],
            [
                [f"{n:,}", *(f"{s:.3f}" for s in (compute_s, n / reads.load, n / reads.read))]
                for n, compute_s in reads.compute_s.items()
            ],
        ),
    ]
    if plan.trace is not None:
        blocks.append(_trace_text(plan.trace))
    blocks.append("\n".join(_wrapped(f"- {note}") for note in plan.notes))
    blocks.append(f"flags: {' '.join(plan.flags)}")
    return "\n\n".join(blocks)


def _trace_text(trace: dict[str, Any]) -> str:
    by_tier = _table(
        ["prompt tokens found in", "tokens up to it", "share"],
        [
            [row["tier"], _count(row["tokens"]), f"{row['hit_rate']:.1%}"]
            for row in trace["by_tier"]
        ],
    )
    by_size = _table(
        ["one LRU cache, GB", "tokens", "share"],
        [[_gb(r["gb"] * GB), f"{r['tokens']:,}", f"{r['hit_rate']:.1%}"] for r in trace["by_size"]],
    )
    by_l2 = _table(
        ["with L2", "GB a rank", *trace["by_l2"][0]["by_tier"], "in all"],
        [
            [
                f"x {row['factor']}",
                f"{row['rank_gb']:,.2f}",
                *(f"{share:.1%}" for share in row["by_tier"].values()),
                f"{row['hit_rate']:.1%}",
            ]
            for row in trace["by_l2"]
        ],
    )
    sample = "" if trace["share"] == 1 else f" (a sample of {trace['share']:.1%} of the prompts)"
    told = _wrapped(
        f"trace: {trace['requests']:,} requests{sample}, {trace['prompt_tokens']:,} prompt tokens, "
        f"{trace['distinct_tokens']:,} different; a cache without a limit has "
        f"{trace['unlimited_hit_rate']:.1%}"
    )
    more = _wrapped(
        f"the store has {trace['stored_but_computed']:.1%} more, which the engine computes: that "
        "is faster, or the hits are below prefetch_threshold"
    )
    return f"{told}\n{by_tier}\n{more}\n{by_l2}\n{by_size}"

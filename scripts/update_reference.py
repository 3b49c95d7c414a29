#!/usr/bin/env python3
"""Writes docs/reference.md: all flags, environment variables and metrics, from the code.

Usage: `.venv/bin/python scripts/update_reference.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.environ import envs, parse_size
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics, StateMetrics
from sglang.srt.mem_cache.tree.session_hints import SessionMetrics
from sglang.srt.mem_cache.tree.tenants import TenantMetrics
from sglang.srt.observability.engine_metrics import (
    _QUEUES,
    DisaggregationMetrics,
    SchedulerMetrics,
    ServerMetrics,
    TransferMetrics,
    count_dropped_spans,
)
from sglang.srt.server_args import ServerArgs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
_NO_DEFAULT = (None, "", False)
"""Defaults that are not shown: nothing is set, or a switch is off."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        # A bar would end the cell.
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def shown(value: object) -> str:
    """A default as a table shows it."""
    return "" if value in _NO_DEFAULT else f"`{value}`"


def flags() -> Iterator[tuple[str, str, str]]:
    """Spellings, default and meaning of each flag, in the order of the code."""
    for field in dataclasses.fields(ServerArgs):
        if not field.metadata["is_shown"]:
            continue
        names = [flag_name(field.name), *field.metadata["aliases"]]
        meaning = field.metadata["help"]
        if choices := field.metadata["choices"]:
            meaning += f" One of {', '.join(f'`{one}`' for one in choices)}."
        yield ", ".join(f"`{name}`" for name in names), shown(field.default), meaning


def variables() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each environment variable."""
    for name, field in envs.fields().items():
        is_size = field.parse is parse_size
        yield f"`{name}`", shown(_size(field.default) if is_size else field.default), field.doc


def _size(default: object) -> str:
    """A number of bytes as a user would write it."""
    assert isinstance(default, int)
    units = (("gb", 30), ("mb", 20), ("kb", 10))
    unit, shift = next((one for one in units if default % (1 << one[1]) == 0), ("", 0))
    return f"{default >> shift}{unit}"


def metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str, str]]:
    """Name with labels, type and meaning of each metric of a registry."""
    known = [one for one in registry._collector_to_names if isinstance(one, MetricWrapperBase)]
    for metric in sorted(known, key=lambda one: one._name):
        name = metric._name + ("_total" if metric._type == "counter" else "")
        labels = f" {{{', '.join(metric._labelnames)}}}" if metric._labelnames else ""
        yield f"`{name}`{labels}", metric._type or "", metric._documentation


def page() -> str:
    """The text of the page."""
    server = ServerMetrics()
    count_dropped_spans(server.registry)
    scheduler = SchedulerMetrics(num_drafts=1)
    HiCacheMetrics(scheduler.registry)
    SessionMetrics(scheduler.registry)
    TenantMetrics(scheduler.registry)
    StateMetrics(scheduler.registry).set_host(total=0, free=0)
    disaggregated = CollectorRegistry()
    DisaggregationMetrics(disaggregated).watch("", dict.fromkeys(_QUEUES, int))
    TransferMetrics(disaggregated, ())
    lines = [
        "# Reference",
        "",
        "Written by `scripts/update_reference.py`.",
        "",
        "## Flags",
        "",
        "Of `sglang.launch_server` and, as arguments, of `sglang.Engine`; "
        "[flags.md](flags.md) has those that this engine refuses or ignores.",
        "",
        *table(("flag", "default", "meaning"), flags()),
        "",
        "## Environment variables",
        "",
        *table(("variable", "default", "meaning"), variables()),
        "",
        "## Metrics",
        "",
        "At `/metrics`, with `--enable-metrics`. Labels are in braces.",
        "",
        "### Of each server",
        "",
        *table(("metric", "type", "meaning"), metrics(server.registry)),
        "",
        "### Of the scheduler and the cache",
        "",
        "Metrics of L2 and L3 exist with a hierarchical cache, metrics of states with a model that "
        "has them, metrics of drafts (`spec_`) with `--speculative-algorithm`; "
        "[hicache.md](hicache.md) explains labels.",
        "",
        *table(("metric", "type", "meaning"), metrics(scheduler.registry)),
        "",
        "### Of prefill and decode servers",
        "",
        *table(("metric", "type", "meaning"), metrics(disaggregated)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

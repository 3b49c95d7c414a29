"""Plot of `simulate trace`: hit rate over cache size, one panel per arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from matplotlib.axes import Axes

_TITLES = {
    "one_tier": "L1 alone",
    "write_through": "L1 + L2, write_through",
    "write_back": "L1 + L2, write_back",
}


def draw(header: dict[str, Any], records: Sequence[dict[str, Any]], path: str) -> None:
    """Write the plot to `path` (PNG). `header` has the options and figures of the trace."""
    arrangements = list(dict.fromkeys(record["arrangement"] for record in records))
    figure, panels = pyplot.subplots(
        1, len(arrangements), figsize=(4.2 * len(arrangements), 4.0), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, arrangement in zip(panels[0], arrangements, strict=True):
        mine = [record for record in records if record["arrangement"] == arrangement]
        _draw_panel(panel, mine, header["unlimited_hit_rate"])
        panel.set_title(_TITLES[arrangement], fontsize=10)
    panels[0][0].set_ylabel("hit rate (share of prompt pages)")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    figure.suptitle(
        f"{Path(header['dataset_path']).name}: {header['requests']} requests, working set "
        f"{header['working_set_pages']} pages of {header['page_size']} tokens "
        f"(lengths / {header['scale']:g})",
        fontsize=9,
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _draw_panel(panel: Axes, records: Sequence[dict[str, Any]], unlimited: float) -> None:
    panel.axhline(unlimited, color="grey", linestyle=":", label="unlimited")
    belady = {record["fraction"]: record["belady_hit_rate"] for record in records}
    sizes = sorted(belady)
    panel.plot(sizes, [belady[size] for size in sizes], "k-", linewidth=1.2, label="Belady")
    has_host = any(record["l2_pages"] for record in records)
    for number, policy in enumerate(dict.fromkeys(record["policy"] for record in records)):
        mine = sorted(
            (record for record in records if record["policy"] == policy),
            key=lambda record: float(record["fraction"]),
        )
        sizes = [record["fraction"] for record in mine]
        style: dict[str, Any] = {
            "color": f"C{number}",
            "marker": "o",
            "markersize": 3,
            "linewidth": 1,
        }
        panel.plot(sizes, [record["hit_rate"] for record in mine], label=policy, **style)
        if has_host:
            on_device = [record["device_hit_rate"] for record in mine]
            label = "from L1" if number == 0 else None
            panel.plot(sizes, on_device, linestyle="--", label=label, **style)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(ticker.PercentFormatter(xmax=1, decimals=0))
    panel.set_xlabel("L1 + L2, share of the working set")
    panel.grid(alpha=0.3)

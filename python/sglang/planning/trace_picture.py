"""Plot of hit rate over cache size: PNG by matplotlib where it is installed, or SVG without it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 64
_GRID_STEPS: Final = 5
SUFFIXES: Final = (".png", ".svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Data of the plot. Sizes are GB of the whole server."""

    title: str
    sizes_gb: Sequence[float]
    """Ascending, above 0."""
    hit_rates: Sequence[float]
    limit: float
    """Hit rate of a cache without a limit."""
    marks: Sequence[tuple[str, float]]
    """Names of tiers with their sizes."""


def check_plot_file(path: str) -> None:
    """Raises ValueError if no plot can be written to `path`; with the remedy."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"--plot {path}: matplotlib is not installed: install it, or write an .svg"
        )


def draw(curve: Curve, path: str) -> None:
    """Write the plot to `path`, which `check_plot_file` accepts."""
    if Path(path).suffix == ".svg":
        Path(path).write_text(to_svg(curve), encoding="utf-8")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.semilogx(curve.sizes_gb, curve.hit_rates, marker="o", markersize=3, label="LRU")
    axes.axhline(curve.limit, color="grey", linestyle=":", label="no limit")
    for number, (name, size) in enumerate(curve.marks):
        axes.axvline(size, color=f"C{number + 1}", linewidth=1, label=f"{name}, {size:,.4g} GB")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1, decimals=0))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("size of the cache, GB")
    axes.set_ylabel("prompt tokens found")
    axes.set_title(curve.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def to_svg(curve: Curve) -> str:
    """The plot as an SVG document."""
    sizes = [*curve.sizes_gb, *(size for _, size in curve.marks)]
    low, high = math.log10(min(sizes)), math.log10(max(sizes))
    span = max(high - low, 1e-9)

    def x(size: float) -> float:
        return _LEFT + (math.log10(size) - low) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, curve.title),
        _text(_WIDTH / 2, _HEIGHT - 14, "size of the cache, GB (logarithmic)"),
        f'<g transform="translate(14 {_HEIGHT / 2:.0f}) rotate(-90)">'
        + _text(0, 0, "prompt tokens found")
        + "</g>",
    ]
    for step in range(_GRID_STEPS + 1):
        rate = step / _GRID_STEPS
        parts.append(_line(_LEFT, y(rate), _WIDTH - _RIGHT, y(rate), "#ddd"))
        parts.append(_text(_LEFT - 6, y(rate) + 4, f"{rate:.0%}", anchor="end"))
    for size in curve.sizes_gb:
        parts.append(_text(x(size), _HEIGHT - _BOTTOM + 18, f"{size:,.3g}"))
    parts.append(_line(_LEFT, y(curve.limit), _WIDTH - _RIGHT, y(curve.limit), "#888", dash=True))
    parts.append(_text(_LEFT + 4, y(curve.limit) - 5, "no limit", anchor="start"))
    for number, (name, size) in enumerate(curve.marks):
        parts.append(_line(x(size), _TOP, x(size), _HEIGHT - _BOTTOM, "#c50"))
        # Alternate heights keep the names of near tiers apart.
        is_at_edge = x(size) > _WIDTH - 2 * _RIGHT
        height = _TOP - 4 - 13 * (number % 2)
        anchor = "end" if is_at_edge else "middle"
        parts.append(_text(x(size), height, f"{name} {size:,.4g}", anchor))
    points = " ".join(
        f"{x(size):.1f},{y(rate):.1f}"
        for size, rate in zip(curve.sizes_gb, curve.hit_rates, strict=True)
    )
    for size, rate in zip(curve.sizes_gb, curve.hit_rates, strict=True):
        parts.append(f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="#06c"/>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dash: bool = False) -> str:
    style = ' stroke-dasharray="4 4"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{style}/>'
    )

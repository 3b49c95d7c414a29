"""Report of a measurement: JSON lines of one schema for files, and a table for readers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from sglang.benchmark.report import append, provenance

Value: TypeAlias = bool | int | float
_DIGITS = 6
"""Significant digits of a figure."""


class Report:
    """Takes the figures of one run in the order in which they are measured.

    Each line of the file is one figure. Its first fields describe the run: `date`, `commit`,
    `host`, `device`, `command` and `arguments`. The figure follows: `case` (the conditions that
    tell figures of one metric apart), `metric`, `value` and `unit`. Optional fields are `expected`
    (written before the measurement), `target` (the value to reach), `limit` (the physical bound)
    and `details`.

    Args:
        command: Words of the command line that choose the measurement.
        arguments: Options of the run.
        device: "cpu", or the name of the GPU.
        path: File that the lines are appended to; None for no file.
    """

    def __init__(
        self, command: str, arguments: Mapping[str, Any], device: str, path: str | Path | None
    ) -> None:
        about = provenance()
        self._path = path
        self._last_case: Mapping[str, Any] = {}
        self._about = {
            "date": about["date"],
            "commit": about["commit"],
            "host": about["hardware"],
            "device": device,
            "command": command,
            "arguments": _plain(arguments),
        }
        host = about["hardware"]
        machine = f"{device}, {host['cores']} cores of {host['cpu']}"
        print(f"{command}: commit {about['commit']}, {machine}")

    def add(
        self,
        metric: str,
        value: Value,
        unit: str,
        case: Mapping[str, Any] | None = None,
        *,
        expected: object = None,
        target: object = None,
        limit: Value | None = None,
        **details: Any,
    ) -> None:
        """Add a figure. Details, such as the raw numbers behind it, are not in the table."""
        line = {
            **self._about,
            "case": _plain(case or {}),
            "metric": metric,
            "value": _plain(value),
            "unit": unit,
        }
        compared = {"expected": expected, "target": target, "limit": limit}
        for name, other in compared.items():
            if other is not None:
                line[name] = _plain(other)
        if details:
            line["details"] = _plain(details)
        append(line, self._path)
        if line["case"] != self._last_case:
            self._last_case = line["case"]
            print(", ".join(f"{name} {one}" for name, one in line["case"].items()))
        shown = ", ".join(f"{name} {line[name]}" for name in compared if name in line)
        print(f"  {metric:<40} {line['value']!s:>12} {unit:<12} {shown}".rstrip(), flush=True)

    def add_all(
        self,
        unit: str,
        figures: Mapping[str, Value | None],
        case: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        """Add several figures of one unit. One that is None was not measured, and is left out."""
        for metric, value in figures.items():
            if value is not None:
                self.add(metric, value, unit, case, **common)


def _plain(value: Any) -> Any:
    """`value` with rounded floats, and without types that JSON lacks."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value

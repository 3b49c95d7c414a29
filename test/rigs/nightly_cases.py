"""Cases that the nightly suite alone runs; `pytest -m ""` does too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def nightly(*values: object, **options: Any) -> Any:
    """`pytest.param(*values, **options)`, a case that the nightly suite alone runs."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def leave_halves(items: Iterable[pytest.Item]) -> None:
    """Leave half of the cases of each test with the mark `half` to the nightly suite."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if next(item.iter_markers("half"), None) is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        _leave_half(cases)


def _leave_half(cases: Sequence[pytest.Item]) -> None:
    """Parameters are the sides of a board: one colour of its squares stays.

    So each value stays, with half of the values of another parameter, or with all where there are
    three parameters. A test with one parameter stays whole, but for values with the mark
    `half(needs="another parameter")`.
    """
    columns = [column for column in _columns_of(cases) if any(column)]
    if len(columns) < 2:
        for case in cases:
            if any("needs" in mark.kwargs for mark in case.iter_markers("half")):
                case.add_marker("nightly")
        return
    for case, *place in zip(cases, *columns, strict=True):
        if sum(place) % 2:
            case.add_marker("nightly")


def _columns_of(cases: Sequence[Any]) -> list[list[int]]:
    """For each parameter the numbers of the cases' values, in the order in which values appear.
    Parameters that are set together are one."""
    together = defaultdict[tuple[int, ...], list[str]](list)
    for name in cases[0].callspec.params:
        together[tuple(case.callspec.indices[name] for case in cases)].append(name)
    found = []
    for names in together.values():
        numbers: dict[str, int] = {}
        values = (repr([case.callspec.params[name] for name in names]) for case in cases)
        found.append([numbers.setdefault(value, len(numbers)) for value in values])
    return found

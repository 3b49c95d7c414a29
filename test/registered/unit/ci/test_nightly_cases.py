"""Cases that are left to the nightly suite, and the suite that runs them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from rigs.nightly_cases import leave_halves
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[4]
MODES: Final = {"mode": [False, True]}
NEEDS_ANOTHER: Final = "needs another"


class Case:
    """A case of a test, as pytest collects it."""

    def __init__(
        self, values: Sequence[Mapping[str, tuple[int, object]]], *, is_half: bool
    ) -> None:
        known = {name: one for of_set in values for name, one in of_set.items()}
        self.nodeid = f"test_it.py::test_it[{known}]"
        self.params = {name: value for name, (_, value) in known.items()}
        indices = {name: index for name, (index, _) in known.items()}
        self.callspec = SimpleNamespace(params=self.params, indices=indices)
        self.marks = [pytest.mark.half] * is_half
        if any(value is NEEDS_ANOTHER for value in self.params.values()):
            self.marks = [pytest.mark.half(needs="another parameter")]

    def iter_markers(self, name: str) -> Any:
        return iter([one for one in self.marks if one.name == name])

    def add_marker(self, name: str) -> None:
        self.marks.append(getattr(pytest.mark, name))


def kept(*sets: Mapping[str, Sequence[object]], is_half: bool = True) -> list[dict[str, object]]:
    """Cases that CI runs of a test with these parameters; those of a set are set together."""
    choices = [
        [
            {name: (index, values[index]) for name, values in one.items()}
            for index in range(len(next(iter(one.values()))))
        ]
        for one in sets
    ]
    cases: list[Any] = [Case(one, is_half=is_half) for one in itertools.product(*choices)]
    leave_halves(cases)
    return [case.params for case in cases if pytest.mark.nightly not in case.marks]


def test_each_pair_of_three_parameters_stays() -> None:
    pages: dict[str, list[object]] = {"page": [1, 16, 16], "chunk": [-1, 16, 7]}
    found = kept({"family": ["a", "b"]}, pages, MODES)
    assert len(found) == 6
    for one, other in itertools.combinations(("family", "chunk", "mode"), 2):
        values = [{case[name] for case in found} for name in (one, other)]
        assert {(case[one], case[other]) for case in found} == set(itertools.product(*values))
    assert {case["chunk"] for case in found} == {-1, 16, 7}


def test_each_value_of_two_parameters_stays() -> None:
    found = kept({"seed": [4, 5, 6, 7]}, MODES)
    assert [(one["seed"], one["mode"]) for one in found] == [
        (4, False), (5, True), (6, False), (7, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sets", [[MODES], [{"seed": [1]}, MODES], [{"seed": [1, 2], "at": [3, 4]}]]
)
def test_a_test_with_one_parameter_stays_whole(sets: list[dict[str, list[object]]]) -> None:
    assert len(kept(*sets)) == 2


def test_a_value_that_needs_another_parameter() -> None:
    modes: dict[str, list[object]] = {"mode": [NEEDS_ANOTHER, True]}
    assert [one["mode"] for one in kept(modes)] == [True]
    assert [one["mode"] for one in kept({"seed": [1, 2]}, modes)] == [NEEDS_ANOTHER, True]


def test_a_test_without_the_mark_stays_whole() -> None:
    assert len(kept({"seed": [1, 2]}, MODES, is_half=False)) == 4


def test_the_nightly_suite_runs_all_cases() -> None:
    script = (REPO / "scripts" / "nightly.sh").read_text(encoding="utf-8")
    run = script[script.index("PYTEST_ADDOPTS='-m \"\"' .venv/bin/python test/run_suite.py") :]
    assert "--suite base-a-test-cpu --suite base-b-test-cpu" in run.partition("|| status")[0]


def test_ci_runs_no_nightly_case(request: pytest.FixtureRequest) -> None:
    config = request.config
    assert "not nightly" in config.getini("addopts")
    assert {"half", "nightly"} <= {line.partition(":")[0] for line in config.getini("markers")}

"""How much of the engine a request enters on its way between a prefill and a decode server."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

WALK: Final = Path(__file__).resolve().parents[4] / "scripts" / "walk.py"


PAIRS: Final = 6
"""Pairs of servers that are walked over, if need be: threads interleave differently in each."""
CEILINGS: Final = {"in_all": (430, 72, 200), "in_pd": (115, 15, 42)}
"""Functions, files and returns of a request until its first token: on both servers; and in
`disaggregation/` alone."""


@pytest.mark.parametrize("part", CEILINGS)
def test_a_request_enters_few_functions_until_its_first_token(part: str) -> None:
    names = runpy.run_path(str(WALK))
    seen: list[tuple[int, int, int]] = []
    for _ in range(PAIRS):
        trail = names["Trail"]()
        with trail.installed(), contextlib.ExitStack() as stack:
            walks = names["Walker"](trail, stack).walk("pair")
        found = [getattr(walk, part) for walk in walks]
        seen += [(one.functions, one.files, one.returns) for one in found]
        if any(all(a <= b for a, b in zip(one, CEILINGS[part], strict=True)) for one in seen):
            return
    raise AssertionError(f"{sorted(seen)} are above {CEILINGS[part]}")

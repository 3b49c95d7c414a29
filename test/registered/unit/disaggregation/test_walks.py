"""How much of the engine a request enters on its way between a prefill and a decode server."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path
from typing import Any, Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

WALK: Final = Path(__file__).resolve().parents[4] / "scripts" / "walk.py"


@pytest.fixture(scope="module")
def walks() -> Any:
    """Walks to the first token, over both servers. Threads interleave differently in each."""
    names = runpy.run_path(str(WALK))
    trail = names["Trail"]()
    with trail.installed(), contextlib.ExitStack() as stack:
        return names["Walker"](trail, stack).walk("pair")


def shortest(walks: Any) -> Any:
    return min(walks, key=lambda counts: counts.functions + counts.returns)


def assert_at_most(counts: Any, functions: int, files: int, returns: int) -> None:
    found = counts.functions, counts.files, counts.returns
    most = functions, files, returns
    assert all(a <= b for a, b in zip(found, most, strict=True)), f"{found} is above {most}"


def test_a_request_enters_few_functions_until_its_first_token(walks: Any) -> None:
    assert_at_most(shortest([walk.in_all for walk in walks]), 430, 72, 200)


def test_prefill_and_decode_enter_few_functions_of_their_own(walks: Any) -> None:
    assert_at_most(shortest([walk.in_pd for walk in walks]), 115, 15, 42)

"""docs/pd.md says what routers make of requests and answers: each row is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.disaggregation.router_probe import Probe, RouterFacts, running_router
from rigs.disaggregation.router_rows import ROUTERS, ROWS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")


@pytest.fixture(scope="module", params=ROUTERS.values(), ids=list(ROUTERS))
def facts(request: pytest.FixtureRequest) -> RouterFacts:
    made: RouterFacts = request.param
    return made


@pytest.fixture(scope="module")
def probes(
    facts: RouterFacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Probe]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running_router(facts, folder, is_pair=is_pair))
            for name, is_pair in (("pair", True), ("plain", False))
            for folder in (Path(tmp_path_factory.mktemp(name)),)
        }


@pytest.mark.parametrize("behind", ["pair", "plain"])
@pytest.mark.parametrize("row", ROWS)
def test_row_holds(facts: RouterFacts, probes: dict[str, Probe], behind: str, row: str) -> None:
    ROWS[row](facts, probes[behind])

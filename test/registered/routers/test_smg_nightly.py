"""docs/pd.md says what `smg` makes of requests and answers: each row is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.disaggregation.router_probe import running_router
from rigs.disaggregation.router_rows import ROWS, SMG, SMG_ENVIRONMENT
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="nightly-test-cpu", nightly=True)


@pytest.mark.parametrize("is_pair", [True, False], ids=["pair", "plain"])
def test_rows(tmp_path: Path, is_pair: bool) -> None:
    assert SMG_ENVIRONMENT.is_dir(), f"no {SMG_ENVIRONMENT}: run scripts/nightly.sh"
    with running_router(SMG, tmp_path, is_pair=is_pair) as probe:
        for check in ROWS.values():
            check(SMG, probe)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

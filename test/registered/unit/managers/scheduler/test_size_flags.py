"""Every combination of sizes that a server starts with serves every prompt that it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings

from rigs.schedulers.size_flags import is_served_where_accepted, size_flags
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=11, suite="base-a-test-cpu")


@settings(
    # The nightly test beside this one tries more.
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(flags=size_flags())
def test_what_is_accepted_is_served_to_its_end(model: Path, flags: dict[str, Any]) -> None:
    assume(is_served_where_accepted(model, flags))

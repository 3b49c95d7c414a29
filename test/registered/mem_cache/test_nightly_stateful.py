"""The state machines of the files beside this one, for minutes instead of seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=240, suite="nightly-test-cpu", nightly=True)


def machine(file: str, name: str) -> type[RuleBasedStateMachine]:
    """The class `name` of a test file in this folder."""
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[RuleBasedStateMachine] = getattr(module, name)
    return found


@pytest.mark.parametrize(
    ("file", "name", "examples"),
    [
        ("test_tiers_stateful", "Tiers", 4000),
        ("test_pools_stateful", "Allocator", 2000),
        ("test_pools_stateful", "HostPool", 2000),
        ("test_pools_stateful", "Radix", 2000),
    ],
)
def test_long_runs_against_a_dict_of_pages(file: str, name: str, examples: int) -> None:
    run_state_machine_as_test(
        machine(file, name),
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""The stateful tests of the unit suite, for minutes instead of seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.random_runs import run_machine
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=460, suite="nightly-test-cpu", nightly=True)

UNIT_TESTS = Path(__file__).resolve().parents[1] / "unit" / "mem_cache"


def part_of(file: str, name: str) -> Any:
    """The class or function `name` of a file of the unit tests of `mem_cache`."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, UNIT_TESTS / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("file", "name", "examples"),
    [
        ("test_tiers_stateful.py", "Tiers", 4000),
        ("test_tiers_stateful.py", "StateTiers", 2000),
        ("host/test_pools_stateful.py", "Allocator", 2000),
        ("host/test_pools_stateful.py", "HostPool", 2000),
        ("host/test_pools_stateful.py", "Radix", 2000),
    ],
)
def test_long_runs_against_a_dict_of_pages(file: str, name: str, examples: int) -> None:
    run_machine(part_of(file, name), examples, steps=60)


@pytest.mark.timeout(1200)
def test_a_listener_knows_all_tiers_after_20_000_prompts(tmp_path: Path) -> None:
    part_of("tree/test_kv_events.py", "random_run")(3, tmp_path, seed=7, steps=20_000)

"""Sizes from corner to corner, longer: other combinations every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from rigs.schedulers.size_flags import is_served_where_accepted, size_flags
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=200, suite="nightly-test-cpu", nightly=True)


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("model")


@pytest.mark.timeout(900)
@settings(
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(flags=size_flags())
def test_what_is_accepted_is_served_to_its_end_longer(model: Path, flags: dict[str, Any]) -> None:
    assume(is_served_where_accepted(model, flags))

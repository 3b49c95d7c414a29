"""Kernels of several ranks, interpreted: barriers between them (`rigs.schedulers.meeting_ranks`),
and choices of an indexer that they divide (`rigs.layers.latent_ranks`).

On GPUs `test/registered/gpu/test_ranks_cuda.py` runs the same kernels.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from rigs.nightly_cases import nightly
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-b-test-cpu")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def output_of(*command: str) -> list[str]:
    """Lines of a module that must end with 0."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=child_environment() | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("ranks", [nightly("2"), "3"])
def test_sums_and_greatest_logits_of_ranks_that_come_at_different_times(ranks: str) -> None:
    said = output_of("rigs.schedulers.meeting_ranks", ranks)
    assert said == [f"0 of {ranks} ranks failed, 0 flags left"]


@pytest.mark.parametrize("ranks", ["2", nightly("3")])
def test_ranks_divide_the_choices_of_an_indexer(ranks: str) -> None:
    assert output_of("rigs.layers.latent_ranks", ranks) == []

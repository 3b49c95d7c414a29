"""Kernels of several ranks, interpreted: barriers between them (`rigs.schedulers.meeting_ranks`),
and choices of an indexer that they divide (`rigs.layers.latent_ranks`).

On GPUs `test/registered/gpu/test_ranks_cuda.py` runs the same kernels.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-b-test-cpu")

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


def test_sums_and_greatest_logits_of_ranks_that_come_at_different_times() -> None:
    assert output_of("rigs.schedulers.meeting_ranks", "2", "3") == [
        "0 of 2 ranks failed, 0 flags left",
        "0 of 3 ranks failed, 0 flags left",
    ]


def test_ranks_divide_the_choices_of_an_indexer() -> None:
    assert output_of("rigs.layers.latent_ranks") == []

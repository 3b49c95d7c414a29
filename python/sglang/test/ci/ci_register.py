"""Test registration: what a test file costs and which suite runs it.

Every file under `test/registered` calls one of these at module level, with literal arguments.
They do nothing when they run: `test/run_suite.py` reads the calls from the syntax tree, so that
collecting a suite imports no test.
"""

from __future__ import annotations


def register_cpu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Register the calling file for a CPU suite.

    Args:
        est_time: Seconds the file takes on the suite's machine; balances partitions.
        suite: Name of the suite, e.g. `base-a-test-cpu`. Absent where `stage` is given.
        nightly: Only run with `--nightly`.
        disabled: Why the file is not run; shown in every summary.
        stage: With `runner_config`, names the suite `{stage}-test-{runner_config}`.
        runner_config: See `stage`.
    """


def register_cuda_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Register the calling file for a CUDA suite; parameters as in `register_cpu_ci`."""


def register_npu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Register the calling file for an NPU suite; parameters as in `register_cpu_ci`."""

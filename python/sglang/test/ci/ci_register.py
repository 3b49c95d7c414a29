"""Registration of test files: their cost and their suite.

Every file under `test/registered` calls one of these functions at module level, with literal
arguments. The functions do nothing: `test/run_suite.py` reads the calls from the syntax tree, so
that collecting a suite imports no test.
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
    alone: bool = False,
) -> None:
    """Register the calling file for a CPU suite; the others register it for a CUDA or an NPU suite.

    Args:
        est_time: Seconds that the file takes on the suite's machine, to balance partitions.
        suite: Name of the suite, e.g. `base-a-test-cpu`; None if `stage` is given.
        nightly: True if the file runs only with `--nightly`.
        disabled: Why the file does not run; every summary shows it.
        stage: With `runner_config`, gives the suite `{stage}-test-{runner_config}`.
        runner_config: See `stage`.
        alone: True if the file needs the machine for itself, e.g. because it measures. If false,
            one more file may run at the same time.
    """


register_cuda_ci = register_cpu_ci
register_npu_ci = register_cpu_ci

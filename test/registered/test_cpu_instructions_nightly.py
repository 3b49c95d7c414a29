"""Tests that compare numbers or words also pass with other instruction sets of the CPU.

torch and oneDNN take the best instructions that the CPU has. Instruction sets differ in the order
of sums, and with it in the last bits. Settings that change nothing on this CPU are skipped by name:
instructions that the CPU lacks, and its defaults, which CI runs anyway.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1800, suite="nightly-test-cpu", nightly=True)

REGISTERED: Final = Path(__file__).parent
SETTINGS: Final = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX",
)
WITHIN_A_PROCESS: Final = (
    "unit/builtin_model",
    "unit/layers",
    "unit/models",
    "unit/model_executor",
    "unit/managers/scheduler/whole",
)
OF_PROCESSES: Final = (
    "disaggregation/test_pd_requests.py",
    "distributed/test_rank_groups_over_gloo.py",
    "entrypoints/test_structured_output.py",
    "hicache/test_recall_hybrid.py",
    "hicache/test_same_words.py",
    "hicache/test_same_words_of_families.py",
)
PROBE: Final = """
import torch
x = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x)
print("torch takes", torch.backends.cpu.get_cpu_capability())
"""
LIMIT_S: Final = 1500


def environment(setting: str | None) -> dict[str, str]:
    """This process's environment, with one thread and with `setting`."""
    names = {one.partition("=")[0] for one in SETTINGS}
    env = {name: value for name, value in child_environment().items() if name not in names}
    name, _, value = (setting or "").partition("=")
    return {**env, "OMP_NUM_THREADS": "1"} | ({name: value} if name else {})


@cache
def taken(setting: str | None) -> tuple[str, str]:
    """The instructions that torch takes, and oneDNN's kernel of products in bf16, if any."""
    env = environment(setting) | {"ONEDNN_VERBOSE": "1"}
    said = subprocess.check_output([sys.executable, "-c", PROBE], env=env, text=True)
    vectors = re.findall(r"torch takes (\w+)", said)
    kernels = re.findall(r"exec,cpu,matmul,([^,]+)", said)
    return vectors[0], kernels[0] if kernels else "none"


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    mine = str(request.param)
    for other in (None, *SETTINGS[: SETTINGS.index(mine)]):
        if taken(other) == taken(mine):
            pytest.skip(f"as {other or 'without a setting'} on this CPU: {taken(mine)}")
    return mine


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("files", [WITHIN_A_PROCESS, *((file,) for file in OF_PROCESSES)], ids=str)
def test_numbers_and_words_hold(setting: str, files: tuple[str, ...]) -> None:
    paths = [REGISTERED / file for file in files]
    assert all(map(os.path.exists, paths))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, paths)],
        env=environment(setting),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(setting, taken(setting), done.stdout.splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]

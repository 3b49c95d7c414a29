"""Memory that a CPU's libraries keep for each number of tokens is bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.environ import child_environment, envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")


UNBOUNDED = "4096"


def grown_mb(checkpoint: Path, env: dict[str, str]) -> float:
    """MB that prompts of 27 to 32 tokens leave allocated after shorter ones filled the caches.

    Longer prompts make torch's attention allocate blocks of 4 MB once, which no setting bounds.
    """
    done = subprocess.run(
        [sys.executable, "-m", "rigs.models.memory_by_length", str(checkpoint),
         "1", "27", "33"],
        env=env, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this CPU"
)
def test_new_lengths_leave_nothing_behind_once_the_caches_are_full(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    env = child_environment()
    fields = (envs.ONEDNN_PRIMITIVE_CACHE_CAPACITY.name, envs.LRU_CACHE_CAPACITY.name)
    for name in fields:
        env.pop(name, None)  # the engine's own are in question
    unbounded = grown_mb(tmp_path, env | dict.fromkeys(fields, UNBOUNDED))
    # Half of it is each cache's.
    assert grown_mb(tmp_path, env) < unbounded / 10

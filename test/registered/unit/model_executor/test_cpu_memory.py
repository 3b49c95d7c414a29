"""Memory that a CPU's libraries keep for each number of tokens is bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.environ import child_environment, envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.models.tiny_models import save_tiny_checkpoint

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_new_lengths_leave_nothing_behind_once_the_caches_are_full(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    env = child_environment()
    for field in (envs.ONEDNN_PRIMITIVE_CACHE_CAPACITY, envs.LRU_CACHE_CAPACITY):
        env.pop(field.name, None)  # the engine's own are in question
    command = [sys.executable, "-m", "sglang.test.models.memory_by_length", str(tmp_path)]
    # On CPUs with AMX torch's attention keeps kernels of its own, of up to 256 tokens, for each
    # thread: 9 MB, which no setting bounds. They are all there by then.
    done = subprocess.run(
        [*command, "1", "257", "449"], env=env, check=True, capture_output=True, timeout=120
    )
    assert float(done.stdout) < 8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

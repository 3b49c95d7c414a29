"""A step without memory ends the scheduler with a line that names the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from sglang.srt.managers.scheduler.launched_step import StepOutOfMemory, explaining_out_of_memory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

_REMEDY = "lower --mem-fraction-static, --max-prefill-tokens or --chunked-prefill-size: "


def test_a_shortage_on_the_cpu_names_the_settings() -> None:
    message = f"{_REMEDY}.*tried to allocate \\d+ bytes"
    with pytest.raises(StepOutOfMemory, match=message), explaining_out_of_memory():
        torch.empty(1 << 60, dtype=torch.uint8)


def test_other_errors_pass_as_they_are() -> None:
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ") as raised, explaining_out_of_memory():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("step", ["forward_batch_generation", "process"])
def test_a_step_without_memory_ends_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    rig = SchedulerRig(tmp_path)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee below.")

    owner = rig.worker if step != "process" else rig.scheduler._results
    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(StepOutOfMemory, match=f"{_REMEDY}CUDA out of memory.*2 GiB\\.$"):
        rig.run(rig.request("r", prompt(1, 8)))
    rig.close()

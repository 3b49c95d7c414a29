"""Launching a step waits for nothing that runs on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.utils.device import detect_device
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.scheduler_rig import SchedulerRig, greedy, prompt

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")  # noqa: TID251
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")  # noqa: TID251


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_launch_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    monkeypatch.setattr(SchedulerRig, "overlap", True)
    rig = SchedulerRig(tmp_path, page_size=page_size, chunked_prefill_size=32)
    rig.generate([prompt(0, 40)])  # compiles kernels
    launches = 0

    def strict(launch: Any) -> Any:
        def launching(scheduler: Scheduler) -> Any:
            nonlocal launches
            launches += 1
            with waiting_is_an_error():
                return launch(scheduler)

        return launching

    for name in ("_launch_prefill", "_launch_decode"):
        monkeypatch.setattr(Scheduler, name, strict(getattr(Scheduler, name)))
    params = [
        greedy(20), greedy(20, frequency_penalty=0.5), greedy(9, logit_bias={"7": 3.0}),
        greedy(12, min_new_tokens=4), greedy(17),
    ]  # fmt: skip
    params[4].temperature = 1.0
    messages = [
        rig.request(f"r{i}", prompt(i, 9 + 11 * i), p, return_logprob=i == 4, top_logprobs_num=3)
        for i, p in enumerate(params)
    ]
    rig.run(*messages)
    assert launches > 20


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

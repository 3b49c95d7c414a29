"""A tick of the scheduler waits for nothing that runs on the device but the tokens it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.layers import latent_ranks
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.attention import latent_triton_backend
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.triton_ops.attention import indexer_scores
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.messages.io_struct import Tick
from sglang.test.ci.ci_register import register_cuda_ci

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
@pytest.mark.parametrize("tiers", [False, True])
def test_no_tick_waits_for_the_device_but_for_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, tiers: bool
) -> None:
    """Launching, caching, copying, evicting: waiting for a step's end is an event's business."""
    monkeypatch.setattr(SchedulerRig, "overlap", True)
    args: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_size": 1} if tiers else {}
    rig = SchedulerRig(tmp_path, page_size=page_size, chunked_prefill_size=32, **args)
    rig.generate([prompt(0, 40)])  # compiles kernels
    ticks = 0
    step = Scheduler.step

    def strict(scheduler: Scheduler, tick: Tick) -> Any:
        nonlocal ticks
        ticks += 1
        with waiting_is_an_error():
            return step(scheduler, tick)

    monkeypatch.setattr(Scheduler, "step", strict)
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
    for seed in range(10, 25):  # until pages are evicted, then what comes back from L2
        rig.generate([prompt(seed, 60)])
    rig.generate([prompt(10, 60)])
    assert ticks > 100


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_the_host_does_not_wait_in_a_long_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Tokens choose under a mask, and later ones choose rows."""
    for name, value in latent_ranks.LIMITS.items():
        monkeypatch.setattr(latent_triton_backend, name, value)
    monkeypatch.setattr(indexer_scores, "_MANY_TOKENS", 1)
    save_tiny_checkpoint(tmp_path, "deepseek_v32", **latent_ranks.SIZES)
    driver = StepDriver(
        tmp_path, page_size=16, device="cuda", kv_cache_dtype=dtype, disable_cuda_graph=True
    )
    forward = driver.runner.forward

    def strict(batch: ForwardBatch) -> Any:
        with waiting_is_an_error():
            return forward(batch)

    driver.extend([(0, prompt(1, 120))])
    monkeypatch.setattr(driver.runner, "forward", strict)
    driver.extend([(1, prompt(2, 120))])

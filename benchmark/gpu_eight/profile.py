"""The section `profile` of `gpu-eight`: a prefill and decode steps, kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from benchmark.gpu_eight.shapes import SHAPES, Shape
from benchmark.gpu_ranks.kernels import add_step, kernel_sums, profiled
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import get_attention_tp_group, get_world_group
from sglang.srt.hardware_backend.device_runtime import device_runtime

STEPS: Final = 8
_TIMEOUT_S: Final = 300.0
_KINDS: Final = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}


def profile_rank(model: str, name: str) -> dict[str, dict[str, Any]]:
    """One rank's part: a prefill of the shortest prompt, and steps of one and of all requests."""
    shape = SHAPES[name]
    rows, length = max(shape.decodes), min(shape.prompts)
    # Each row decodes in both batches: once, and twice `STEPS` times.
    new = -(-2 * (2 * STEPS + 1) // shape.page_size) * shape.page_size + shape.page_size
    driver = StepDriver(
        model,
        page_size=shape.page_size,
        pool_tokens=rows * (shape.decode_input + new) + 2 * (length + shape.page_size),
        max_requests=rows + 2,
        gpu_id=get_world_group().rank,
        tp_group=get_attention_tp_group(),
        device=shape.device,
        load_format="dummy",
        **_runner_fields(shape),
    )
    found = {}
    found[f"prefill of {length}"] = _measured(
        shape, partial(driver.extend, [(rows, shape.prompt(1, length))]),
        partial(driver.extend, [(rows + 1, shape.prompt(2, length))]), 1,
    )  # fmt: skip
    for row in range(rows):
        driver.extend([(row, shape.prompt(3 + row, shape.decode_input))])
    for batch in ([rows], list(range(rows))):
        # Rows have tokens of their own, since equal tokens choose equal experts.
        step = partial(driver.decode, [(row, 11 + 37 * row) for row in batch])
        context = driver.lens[batch[0]]
        found[f"{len(batch)} x {context}"] = _measured(shape, step, step, STEPS)
    return found


def _measured(shape: Shape, warm_up: Any, step: Any, steps: int) -> dict[str, Any]:
    """`step` several times with a clock, and as often in a profile."""
    wait = device_runtime(shape.device).synchronize
    warm_up()
    wait()
    begun = time.perf_counter()
    if steps > 1:
        for _ in range(steps):
            step()
    wait()
    step_ms = (time.perf_counter() - begun) / steps * 1e3 if steps > 1 else None

    def work() -> None:
        for _ in range(steps):
            step()

    events = profiled(work, _KINDS[shape.device])
    return {"step_ms": step_ms, **kernel_sums(events, steps)}


def _runner_fields(shape: Shape) -> Mapping[str, Any]:
    """The flags of `shape` that a runner takes."""
    given = dict(zip(shape.flags[::2], shape.flags[1::2], strict=True))
    return {
        "kv_cache_dtype": given.get("--kv-cache-dtype", "auto"),
        "quantization": given.get("--quantization"),
    }


def measure_profile(name: str, model: str, ranks: int, report: Report) -> None:
    """Kernels of rank 0, and the figures of each rank."""
    device = SHAPES[name].device
    results = run_ranks(ranks, profile_rank, model, name, device=device, timeout_s=_TIMEOUT_S)
    for rank, batches in enumerate(results):
        for batch, found in batches.items():
            add_step(report, {"ranks": ranks, "rank": rank, "batch": batch}, found)

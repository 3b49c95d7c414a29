"""The section `profile` of `gpu-eight`: a prefill and decode steps, kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from benchmark.gpu_eight.shapes import SHAPES, Shape
from benchmark.gpu_ranks.kernels import add_step, kernel_sums, profiled
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import get_attention_tp_group, get_world_group
from sglang.srt.hardware_backend.device_runtime import device_runtime

STEPS: Final = 8
_TIMEOUT_S: Final = 300.0
_Work: TypeAlias = Sequence[Callable[[], object]]


def profile_rank(model: str, name: str) -> dict[str, dict[str, Any]]:
    """One rank's part: a prefill of the shortest prompt, and steps of one and of all requests."""
    shape = SHAPES[name]
    rows, length = max(shape.decodes), min(shape.prompts)
    # Each row decodes in both batches: once, and twice `STEPS` times.
    new = -(-2 * (2 * STEPS + 1) // shape.page_size) * shape.page_size + shape.page_size
    driver = StepDriver(
        model,
        page_size=shape.page_size,
        pool_tokens=rows * (shape.decode_input + new) + 3 * (length + shape.page_size),
        max_requests=rows + 3,
        gpu_id=get_world_group().rank,
        tp_group=get_attention_tp_group(),
        device=shape.device,
        load_format="dummy",
        **_runner_fields(shape),
    )
    prefills = [partial(driver.extend, [(rows + i, shape.prompt(i, length))]) for i in range(3)]
    found = {f"prefill of {length}": _measured(shape, *([one] for one in prefills))}
    for row in range(rows):
        driver.extend([(row, shape.prompt(3 + row, shape.decode_input))])
    for batch in ([rows], list(range(rows))):
        # Rows have tokens of their own, since equal tokens choose equal experts.
        step = partial(driver.decode, [(row, 11 + 37 * row) for row in batch])
        steps, context = [step] * STEPS, driver.lens[batch[0]]
        found[f"{len(batch)} x {context}"] = _measured(shape, [step], steps, steps)
    return found


def _measured(shape: Shape, warm_up: _Work, timed: _Work, seen: _Work) -> dict[str, Any]:
    """Figures of steps on average: of some with a clock, and of others in a profile."""
    wait = device_runtime(shape.device).synchronize
    _run(warm_up)
    wait()
    begun = time.perf_counter()
    _run(timed)
    wait()
    step_ms = (time.perf_counter() - begun) / len(timed) * 1e3
    events = profiled(partial(_run, seen))
    return {"step_ms": step_ms, **kernel_sums(events, len(seen))}


def _run(work: _Work) -> None:
    for one in work:
        one()


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

"""Time in which the device waits for the CPU, without and with L2, under a load without hits.

    python benchmark/gpu_idle.py [--rounds 3] [--json FILE]

Two schedulers in this process on one GPU, without HTTP, run the same load in turn: Qwen3-8B's shape
with dummy weights, 32 requests at once, 2,048 random tokens in, 128 out. Events around each forward
give its time and the gap after the last one; wrapped functions give the CPU's time in each.
`gpu_hicache.py unused` has the same load over HTTP.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
from gpu_server import random_prompt

from rigs.models.qwen3_8b import dummy_model
from sglang.benchmark.report import emit, provenance
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.messages.io_struct import (
    BatchTokenIDOutput,
    Tick,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.control import InputHandler
from sglang.srt.managers.scheduler.launched_step import StepResult
from sglang.srt.managers.scheduler.prefill import PrefillScheduler
from sglang.srt.managers.scheduler.process.build import build_scheduler
from sglang.srt.managers.scheduler.results import ResultProcessor
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

CONCURRENT, INPUT, OUTPUT, REQUESTS = 32, 2048, 128, 96
TIERS: Final[dict[str, dict[str, Any]]] = {
    "GPU only": {},
    "+ L2": {"enable_hierarchical_cache": True, "hicache_size": 12.0},
}


class Probe:
    """Events around forwards and seconds in functions, of the scheduler that runs."""

    def __init__(self) -> None:
        self.forwards: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for owner, name in (
            (HiRadixCache, "check_hicache_events"),
            (HiRadixCache, "start_writing_host_cache"),
            (RadixCache, "cache_unfinished_req"),
            (RadixCache, "cache_finished_req"),
            (PrefillScheduler, "schedule"),
            (ResultProcessor, "process"),
            (StepResult, "wait"),
            (InputHandler, "handle"),
            (Scheduler, "_launch_prefill"),
            (Scheduler, "_launch_decode"),
        ):
            self._time(owner, name)
        self._around_forwards()

    def _time(self, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[f"{owner.__name__}.{name}"] += time.perf_counter() - begun

        setattr(owner, name, timed)

    def _around_forwards(self) -> None:
        inner = Scheduler._forward

        def forward(
            scheduler: Scheduler, batch: ModelWorkerBatch
        ) -> tuple[StepResult, torch.Tensor]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            is_prefill = batch.forward.extend_seq_lens_cpu is not None
            before.record()
            result = inner(scheduler, batch)
            after.record()
            self.forwards.append((is_prefill, before, after))
            return result

        Scheduler._forward = forward  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, Any]:
        """Figures since the last call, in milliseconds."""
        torch.cuda.synchronize()
        busy: defaultdict[str, float] = defaultdict(float)
        idle: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        last: torch.cuda.Event | None = None
        for is_prefill, before, after in self.forwards:
            kind = "prefill" if is_prefill else "decode"
            busy[kind] += before.elapsed_time(after)
            counts[kind] += 1
            if last is not None:
                idle[kind] += last.elapsed_time(before)
            last = after
        spent = {name: value * 1e3 for name, value in sorted(self.seconds.items())}
        self.forwards.clear()
        self.seconds.clear()
        return {"busy_ms": dict(busy), "idle_ms": dict(idle), "steps": dict(counts),
                "cpu_ms": spent}  # fmt: skip


def run_load(scheduler: Scheduler, seed: int) -> float:
    """Seconds for `REQUESTS` requests, `CONCURRENT` of them under way."""
    params = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    params.normalize()
    messages = [
        TokenizedGenerateReqInput(
            rid=f"{seed}-{i}", input_ids=token_array(random_prompt(seed + i, INPUT)),
            sampling_params=params, seed=i, stream=True,
        )
        for i in range(REQUESTS)
    ]  # fmt: skip
    begun = time.perf_counter()
    arriving, messages = messages[:CONCURRENT], messages[CONCURRENT:]
    ended = 0
    while ended < REQUESTS:
        outputs = scheduler.step(Tick(time.monotonic(), arriving))
        finished = sum(
            one.finish_reason is not None
            for output in outputs
            if isinstance(output, BatchTokenIDOutput)
            for one in output.outputs
        )
        ended += finished
        arriving, messages = messages[:finished], messages[finished:]
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def out(record: dict[str, Any]) -> None:
        emit(record, args.json)

    out(provenance())
    seconds: dict[str, list[float]] = {name: [] for name in TIERS}
    with dummy_model() as model:
        built = {
            name: build_scheduler(
                ServerArgs.from_kwargs(
                    model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
                    device="cuda", page_size=64, max_total_tokens=98304, **tier,
                ).resolve()
            )
            for name, tier in TIERS.items()
        }  # fmt: skip
        probe = Probe()
        for number in range(-1, args.rounds):
            for place, (name, one) in enumerate(built.items()):
                taken = run_load(one.scheduler, 1 + REQUESTS * (2 * number + 2 + place))
                figures = probe.take()
                if number >= 0:
                    seconds[name].append(taken)
                    out({"what": "one round", "name": name, "s": taken, **figures})
                _settle(one.scheduler)
        for one in built.values():
            one.scheduler.close()
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    out({"what": "+ L2 over GPU only, seconds", "ratio": statistics.median(ratios),
         "ratios": ratios})  # fmt: skip


def _settle(scheduler: Scheduler) -> None:
    """Run until idle, outside of the measurement."""
    until = time.monotonic() + 10
    while not scheduler.is_idle() and time.monotonic() < until:
        scheduler.step(Tick(time.monotonic(), []))


if __name__ == "__main__":
    main()

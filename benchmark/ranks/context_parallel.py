"""Costs and savings of ranks on a CPU over gloo: prefill by context parallelism, decoding by TP.

A dense model with random weights, fp32. A size is RANKSxCP: RANKS processes of one thread each, in
CP sets that split the tokens of a prefill; the ranks of a set split layers. For each size: figures
of the slowest rank, beside the counts that are expected on paper. `prefill_cpu` is the CPU time of
a rank, which other work on the machine hardly lengthens. If there are more ranks than cores, no
time is saved, and only the counts mean something.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.report import Report
from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_processes import run_ranks
from rigs.schedulers.scheduler_rig import prompt
from sglang.srt.distributed.parallel_state import get_attention_cp_group, get_attention_tp_group
from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.layers.forward_batch_info import ForwardBatch

HEADS: Final = 8
KV_HEADS: Final = 4
VOCABULARY: Final = 2048
_FP32: Final = 4
_PAGE: Final = 64
_BATCH: Final = 4
"""Requests of a decode step."""


class CountedGroup(PlaceInGroup):
    """Another group, whose collectives, bytes given by this rank, and seconds are counted."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self.clear()

    def clear(self) -> None:
        self.collectives, self.bytes, self.seconds = 0, 0, 0.0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._counted(self._group.all_reduce, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._counted(self._group.all_gather, x)

    def _counted(
        self, collective: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if self.size == 1:
            return collective(x)
        self.collectives += 1
        self.bytes += x.nbytes
        began = time.perf_counter()
        try:
            return collective(x)
        finally:
            self.seconds += time.perf_counter() - began

    def counts(self, steps: int) -> dict[str, float]:
        """Counts for one step, if there were `steps`."""
        return {
            "collectives": self.collectives / steps,
            "mb_given": self.bytes / steps / 1e6,
            "ms": self.seconds / steps * 1e3,
        }


def expected(args: argparse.Namespace, ranks: int, cp: int) -> dict[str, Any]:
    """Counts for one rank, derived on paper."""
    tp = ranks // cp
    kv_bytes = 2 * KV_HEADS // tp * (args.hidden // HEADS) * _FP32
    hidden = args.hidden * _FP32
    per_rank = args.tokens // cp
    split = cp > 1
    return {
        "prefill": {
            "tokens_per_rank": per_rank,
            "part_of_the_cpu_time": 1 / ranks,
            "kv_mb_given": split * args.layers * per_rank * kv_bytes / 1e6,
            # Collectives of keys and values in each layer, and of the last token's hidden state.
            "cp": split * (args.layers + 1),
            # Collectives after attention and MLP of each layer, and of the embedding. Sampling,
            # which reads other ranks' logits, is not part of a step here.
            "tp": (tp > 1) * (2 * args.layers + 1),
        },
        "decode": {
            "cp": 0,
            "tp": (tp > 1) * (2 * args.layers + 1),
            "tp_mb_given": (tp > 1) * _BATCH * (2 * args.layers + 1) * hidden / 1e6,
        },
    }


def measure_rank(path: str, tokens: int, steps: int, repeat: int) -> dict[str, Any]:
    """One rank's part: prefills of one prompt each, then decode steps. Run by each process."""
    tp, cp = CountedGroup(get_attention_tp_group()), CountedGroup(get_attention_cp_group())
    pages = (repeat + 1) * (tokens // _PAGE + 1) + _BATCH * (steps // _PAGE + 2)
    driver = StepDriver(
        path,
        page_size=_PAGE,
        pool_tokens=pages * _PAGE,
        max_requests=repeat + 1 + _BATCH,
        tp_group=tp,
        cp_group=cp,
    )
    computed: list[int] = []
    model_forward = driver.runner.model.forward

    def forward(ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> Any:
        computed.append(len(ids))
        return model_forward(ids, positions, batch)

    vars(driver.runner.model)["forward"] = forward
    prefills: list[float] = []
    spent: list[float] = []
    for row in range(repeat + 1):
        if row == 1:  # The first one warms up.
            for group in (tp, cp):
                group.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        driver.extend([(row, prompt(row, tokens, VOCABULARY))])
        prefills.append(time.perf_counter() - began)
        spent.append(time.process_time() - began_cpu)
    report: dict[str, Any] = {
        "prefill": {
            "ms": statistics.median(prefills[1:]) * 1e3,
            "cpu_ms": statistics.median(spent[1:]) * 1e3,
            "all_ms": [one * 1e3 for one in prefills[1:]],
            "tokens_per_rank": computed[-1],
            "cp": cp.counts(repeat),
            "tp": tp.counts(repeat),
        }
    }
    rows = range(repeat + 1, repeat + 1 + _BATCH)
    driver.extend([(row, prompt(row, 16, VOCABULARY)) for row in rows])
    for group in (tp, cp):
        group.clear()
    decodes: list[float] = []
    for step in range(steps):
        began = time.perf_counter()
        driver.decode([(row, step + 1) for row in rows])
        decodes.append(time.perf_counter() - began)
    report["decode"] = {
        "ms": statistics.median(decodes) * 1e3,
        "cp": cp.counts(steps),
        "tp": tp.counts(steps),
    }
    return report


def measure_size(args: argparse.Namespace, path: str, ranks: int, cp: int) -> dict[str, Any]:
    """One size: the rank whose prefill is slowest, and every rank's tokens."""
    work = (path, args.tokens, args.steps, args.repeats)
    preload = ["rigs.models.tiny_models"]
    found = run_ranks(ranks, measure_rank, *work, attn_cp_size=cp, preload=preload)
    slowest: dict[str, Any] = max(found, key=lambda one: float(one["prefill"]["ms"]))
    tokens = [one["prefill"]["tokens_per_rank"] for one in found]
    slowest["prefill"]["tokens_of_ranks"] = tokens
    return slowest


def add_size(report: Report, case: dict[str, int], found: dict[str, Any], wanted: Any) -> None:
    prefill, decode = found["prefill"], found["decode"]
    tokens = prefill["tokens_of_ranks"]
    expected_tokens = wanted["prefill"]["tokens_per_rank"]
    report.add("prefill_tokens", prefill["tokens_per_rank"], "tokens", case,
               expected=expected_tokens, of_ranks=tokens)  # fmt: skip
    report.add("prefill", prefill["ms"], "ms", case, raw=prefill["all_ms"])
    part = wanted["prefill"]["part_of_the_cpu_time"]
    report.add("prefill_cpu", prefill["cpu_ms"], "ms", case, expected=f"{part:.3g} of one rank's")
    report.add("decode", decode["ms"], "ms", case)
    given = {
        ("prefill", "cp"): wanted["prefill"]["kv_mb_given"],
        ("decode", "tp"): wanted["decode"]["tp_mb_given"],
    }
    for step, counts in (("prefill", prefill), ("decode", decode)):
        for group in ("cp", "tp"):
            name, of_group = f"{step}_{group}", counts[group]
            report.add(f"{name}_collectives", of_group["collectives"], "count", case,
                       expected=wanted[step][group])  # fmt: skip
            report.add(f"{name}_given", of_group["mb_given"], "MB", case,
                       expected=given.get((step, group)))  # fmt: skip
            report.add(f"{name}_time", of_group["ms"], "ms", case)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sizes", nargs="+", default=["1x1", "2x2", "4x4", "2x1", "4x1", "4x2"])


def run(args: argparse.Namespace, report: Report) -> None:
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    with tempfile.TemporaryDirectory() as path:
        save_tiny_checkpoint(
            path,
            "qwen3",
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=args.hidden // HEADS,
            max_position_embeddings=args.tokens + args.steps + 64,
        )
        for ranks, cp in sizes:
            found = measure_size(args, path, ranks, cp)
            case = {"ranks": ranks, "attn_cp_size": cp, "attn_tp_size": ranks // cp}
            add_size(report, case, found, expected(args, ranks, cp))


_QUICK: Final = {
    "tokens": 256,
    "layers": 2,
    "hidden": 64,
    "steps": 2,
    "repeats": 1,
    "sizes": ["2x2"],
}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=3, quick=_QUICK)

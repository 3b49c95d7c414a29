"""Prefills and decode steps of the same shapes by transformers' own models.

Measures the same as `gpu-hybrid steps`, but without graphs, as transformers runs its models.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.command import Command
from benchmark.gpu_hybrid.families import LENGTH, STEPS, add_families, model_of, prompt
from benchmark.report import Report
from sglang.srt.hardware_backend.device_runtime import device_runtime


def measure_transformers(family: str, model: str, report: Report, device: str = "cuda") -> None:
    case = {"family": family, "transformers": transformers.__version__}
    runtime = device_runtime(device)
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        )
    peer.eval()
    prefills: list[float] = []
    steps: list[float] = []

    def timed(seconds: list[float], ids: list[int], cache: Any) -> Any:
        runtime.synchronize()
        begun = time.perf_counter()
        output = peer(
            torch.tensor([ids], device=device), past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        runtime.synchronize()
        seconds.append(time.perf_counter() - begun)
        return output.past_key_values

    try:
        with torch.inference_mode():
            for seed in range(2):
                cache = timed(prefills, prompt(seed, LENGTH), None)
            for _ in range(STEPS):
                cache = timed(steps, [7], cache)
    except torch.OutOfMemoryError as error:
        report.add("fails", True, "yes or no", case, error=str(error).splitlines()[0])
        return
    report.add(f"prefill_{LENGTH}", prefills[1], "s", case)
    report.add("decode", statistics.median(steps[4:]) * 1e3, "ms", case)


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family) as model:
            measure_transformers(family, model, report)


COMMAND: Final = Command(run=run, add_options=add_families, devices=("cuda",))

"""Decode steps of many requests after prompts of 2,048 tokens, against the bytes that they read.

The first 12 layers have random weights in their published format, or in `--weights`. A step reads
each weight once, the experts that one of its tokens or more choose (their expected number if all
choices are equally likely), and the keys, values and states of its requests. The limit is the time
of this at the speed of a large copy in the same run.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.gpu_hybrid.families import (
    EXPERTS,
    SHAPES,
    add_families,
    model_of,
    page_of,
    prompt,
)
from benchmark.gpu_hybrid.steps import active_bytes, add_kernels, kept_batches
from benchmark.gpu_timing import device_ms
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver
from sglang.benchmark.one_batch import measure_limits

_LENGTH: Final = 2048
_LAYERS: Final = 12
TARGETS: Final = {"gpt_oss": "at most 1.6"}


def chosen_share(shape: dict[str, Any], tokens: int) -> float:
    """The expected share of experts that at least one of so many tokens chooses."""
    experts = next(shape[name] for name in EXPERTS if name in shape)
    return float(1 - (1 - shape["num_experts_per_tok"] / experts) ** tokens)


def measure_many(family: str, model: str, args: argparse.Namespace, report: Report) -> None:
    requests, page = int(args.requests), page_of(family)
    driver = StepDriver(
        model, page_size=page, pool_tokens=requests * (_LENGTH + page), max_requests=requests,
        device="cuda", load_format="dummy", cuda_graph_max_bs=requests,
        attention_backend=args.attention_backend,
    )  # fmt: skip
    for row in range(requests):
        driver.extend([(row, prompt(row, _LENGTH))])
    forward = driver.runner.forward
    (step,) = kept_batches(driver, lambda: driver.decode([(row, 7) for row in range(requests)]))
    step_ms = device_ms(lambda: forward(step), 16)
    limits = measure_limits("cuda", torch.bfloat16)
    weights = active_bytes(driver, SHAPES[family][2], chosen_share(SHAPES[family][2], requests))
    runner = driver.runner
    cache = requests * (int(_LENGTH * runner.kv_bytes_per_token()) + runner.state_bytes())
    least_ms = (weights + cache) / limits.copy_bytes_per_s * 1e3
    case = {"family": family, "requests": requests, "tokens": _LENGTH, "weights": args.weights}
    report.add("weights", weights / 1e9, "GB", case)
    report.add("cache", cache / 1e9, "GB", case)
    report.add("decode", step_ms, "ms", case, limit=least_ms)
    report.add("times_the_limit", step_ms / least_ms, "ratio", case, target=TARGETS.get(family))
    add_kernels(report, {**case, "of": "a decode step"}, lambda: forward(step))


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        layers = min(_LAYERS, SHAPES[family][2].get("num_hidden_layers", _LAYERS))
        with model_of(family, weights=args.weights, layers=layers) as model:
            measure_many(family, model, args, report)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_families(parser)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="format")
    parser.add_argument("--attention-backend")


COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda",))

"""Experts of 1 to 64 tokens, in kernels for few tokens and in those for many.

Random weights; all layers of a shape in a CUDA graph, so that no cache holds the weights.
Microseconds of one layer.
"""

from __future__ import annotations

import argparse
from typing import Final
from unittest import mock

import torch

from benchmark.command import Command
from benchmark.gpu_hybrid.families import SHAPES, add_families, model_of
from benchmark.gpu_timing import device_ms
from benchmark.report import Report
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock
from sglang.srt.model_executor.graph_capture import GraphCapture


def measure_experts(family: str, model: str, report: Report) -> None:
    driver = StepDriver(
        model, page_size=64, pool_tokens=1024, max_requests=2, device="cuda", load_format="dummy",
        disable_cuda_graph=True,
    )  # fmt: skip
    assert isinstance(driver.runner.model, torch.nn.Module)
    modules = driver.runner.model.modules()
    blocks = [module for module in modules if isinstance(module, SparseMoeBlock)]
    hidden = SHAPES[family][2]["hidden_size"]
    for count in (1, 2, 4, 8, 16, 32, 64):
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        found: dict[str, float] = {}
        for name in ("few", "many"):
            # All layers, so that no cache holds the weights.
            kept = [block._few for block in blocks]

            def run(x: torch.Tensor = x) -> None:
                for block in blocks:
                    block.forward(x, torch.zeros_like(x))

            for block in blocks:
                block._few = block._few if name == "few" else None
            with torch.inference_mode(), mock.patch("sglang.srt.layers.moe.experts.FEW", 64):
                graph, _ = GraphCapture().capture(run)
            found[name] = device_ms(graph.replay, 20) / len(blocks) * 1e3
            for block, few in zip(blocks, kept, strict=True):
                block._few = few
        report.add_all("us/layer", found, {"family": family, "tokens": count})
    del driver
    torch.cuda.empty_cache()


def run(args: argparse.Namespace, report: Report) -> None:
    for family in args.families:
        with model_of(family) as model:
            measure_experts(family, model, report)


COMMAND: Final = Command(run=run, add_options=add_families, devices=("cuda",))

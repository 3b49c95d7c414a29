"""All figures of a model that fills eight GPUs, in one run; with fewer experts on four and two.

Random weights, written in the model's format. `--whole`: all experts, on any number of GPUs.
`--sections` chooses parts, in this order:
`forecast`: figures for H200s, calculated from the config; needs no GPU. `tick`: the agreement of
the ranks over gloo, without a model. `profile`: a prefill and decode steps kernel by kernel,
without a server. `decode`: time per token of 1, 16 and 64 requests. `ttft`: cold, from L2, and from
a Mooncake Store on this host. `turns`: conversations. `trace`: an excerpt of Mooncake's trace.
`unused`: prompts that hit nothing, to this server and then to one without tiers; and the share of
the tick's agreement that the steps hide. `throughput`: long prompts and answers of 64 requests at
once. `pd`: TTFT and transfers of half the GPUs for prefill and half for decoding, with half the
experts.

`--device cpu --shape tiny` tries all of it without GPUs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Final

import torch

from benchmark.command import Command, Refused
from benchmark.gpu_eight.forecast import Forecast, report_forecast
from benchmark.gpu_eight.profile import measure_profile
from benchmark.gpu_eight.sections import (
    measure_decode,
    measure_pd,
    measure_throughput,
    measure_tick,
    measure_trace,
    measure_ttft,
    measure_turns,
    measure_unused,
    report_costs,
)
from benchmark.gpu_eight.shapes import SHAPES, Shape
from benchmark.gpu_hicache.local_store import Store
from benchmark.report import Report
from benchmark.servers import started
from rigs.servers.engine_server import EngineServer

ONE_SERVER: Final = ("decode", "ttft", "turns", "trace", "unused")
SECTIONS: Final = ("forecast", "tick", "profile", *ONE_SERVER, "throughput", "pd")


def measure_server(
    shape: Shape, model: str, gpus: int, wanted: set[str], tick_us: float | None, report: Report
) -> None:
    """The sections of one server with all tiers; `unused` starts another after it."""
    plain = (*shape.server_flags(), "--tp-size", str(gpus))
    extra = f'{{"prefetch_threshold": {shape.page_size}}}'
    tiers = (
        "--enable-hierarchical-cache", "--hicache-size", str(shape.l2_gb),
        "--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", extra,
        "--hicache-storage-prefetch-policy", "wait_complete",
    )  # fmt: skip
    costs = {}
    with ExitStack() as stack:
        store = Store(standalone=False, stack=stack, num_bytes=shape.store_bytes // gpus)
        server = EngineServer(*plain, *tiers, model=model, env=store.env)
        with started({"all tiers": server}, report):
            if "decode" in wanted:
                measure_decode(server, shape, report)
            if "ttft" in wanted:
                measure_ttft(server, shape, report)
            if "turns" in wanted:
                measure_turns(server, shape, report)
            if "trace" in wanted:
                measure_trace(server, shape, report)
            if "unused" in wanted:
                costs["all tiers"] = measure_unused("all tiers", server, shape, report)
    if "unused" in wanted:
        server = EngineServer(*plain, model=model)
        with started({"GPU only": server}, report):
            costs["GPU only"] = measure_unused("GPU only", server, shape, report)
        report_costs(costs["all tiers"], costs["GPU only"], tick_us, report)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, choices=(8, 4, 2), default=8, help="ranks [8]")
    parser.add_argument("--shape", choices=list(SHAPES), default="deepseek_v32")
    parser.add_argument("--whole", action="store_true", help="all experts, whatever --gpus says")
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))


def run(args: argparse.Namespace, report: Report) -> None:
    shape, wanted = SHAPES[args.shape], set(args.sections)
    needs_device = bool(wanted - {"forecast", "tick"})
    if needs_device and args.device != shape.device:
        raise Refused(
            f"--device {args.device} --shape {args.shape}: tiny is for cpu, the others for cuda; "
            "--sections forecast tick run with any shape"
        )
    if args.device == "cuda" and torch.accelerator.device_count() < args.gpus:
        raise Refused(
            f"--gpus {args.gpus}: this host has {torch.accelerator.device_count()} GPUs; give "
            "fewer, or --device cpu --sections forecast"
        )
    begun = time.monotonic()
    tick_us = None
    with shape.model(8 if args.whole else args.gpus, args.layers) as model:
        if "forecast" in wanted:
            report_forecast(Forecast(model, args.gpus, shape.flags), args.shape, report)
        if "tick" in wanted:
            tick_us = measure_tick(args.gpus, shape.ticks, report)
        if "profile" in wanted:
            measure_profile(args.shape, model, args.gpus, report)
        if wanted & set(ONE_SERVER):
            measure_server(shape, model, args.gpus, wanted, tick_us, report)
        if "throughput" in wanted:
            measure_throughput(shape, model, args.gpus, report)
    if "pd" in wanted:
        half = args.gpus // 2
        with shape.model(8 if args.whole else half, args.layers) as model:
            measure_pd(shape, model, half, report)
    report.add("whole_run", time.monotonic() - begun, "s")


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    devices=("cuda", "cpu"),
    quick={"device": "cpu", "shape": "tiny", "gpus": 2},
)

"""Benefit of L2 for conversations with a hybrid: the benchmark that sglang 19663 published.

Qwen3-Next's shape with dummy weights. Clients ask 1,024 new tokens a round and get 1,024; no client
begins a round before all have ended the last. L1 has 65,536 tokens, too few for all conversations
from the fifth round on, and for their running requests from the fourth. Servers: GPU only, and with
an L2 of `--hicache-ratio` times L1. Beside each figure of a round stands what `simulate rounds`
expects; times are expected of `--tp 1` in bf16. `--layers 48 --tp 2 --weights fp8` is the published
setting.

`--device cpu` tries it with the built-in hybrid.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmark.command import Command, Failed, Refused
from benchmark.gpu_hybrid.families import VOCABULARY, model_of
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import ask, load, started, talk
from benchmark.simulate.rounds import (
    ALIGNMENT,
    Talked,
    add_talk,
    add_talk_figures,
    expected,
    h200_costs,
)
from rigs.bench.multiturn import Conversations
from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.serving_metrics import error_counts
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR

_SEED: Final = 30_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A model on a device, and its tokens."""

    flags: tuple[str, ...]
    model: str
    vocabulary: tuple[int, int]
    """Token ids, the last excluded."""

    def prompt(self, seed: int, length: int) -> list[int]:
        return random_prompt(_SEED + seed, length, *self.vocabulary)


def place_of(args: argparse.Namespace, stack: ExitStack) -> Place:
    """The model and its flags, until the stack ends."""
    if args.device == "cpu":
        return Place(flags=(), model=str(BUILTIN_HYBRID_MODEL_DIR), vocabulary=(3, 2000))
    return Place(
        flags=("--device", "cuda", *DUMMY_FLAGS, "--cuda-graph-max-bs", str(args.clients)),
        model=stack.enter_context(model_of("qwen3_next", weights=args.weights, layers=args.layers)),
        vocabulary=(0, VOCABULARY),
    )


def servers_of(args: argparse.Namespace, place: Place) -> dict[str, EngineServer]:
    """Servers with L2 and without."""
    common = (
        *place.flags, "--tp-size", str(args.tp), "--page-size", str(ALIGNMENT),
        "--max-total-tokens", str(args.l1), "--max-mamba-cache-size", str(args.states),
        "--mamba-track-interval", str(args.track_interval),
        "--max-running-requests", str(args.clients),
    )  # fmt: skip
    l2 = ("--enable-hierarchical-cache", "--hicache-ratio", str(args.hicache_ratio))
    return {
        name: EngineServer(*common, *more, model=place.model)
        for name, more in (("GPU only", ()), ("+ L2", l2))
    }


def warm_up(server: EngineServer, args: argparse.Namespace, place: Place) -> None:
    """Compile and connect: prompts of all clients together, two that fill L1, the first again."""
    short = [place.prompt(seed, args.request_length) for seed in range(args.clients)]
    load(server.url, short, 16)
    long = [place.prompt(args.clients + index, args.l1 // 2 - ALIGNMENT) for index in (0, 1)]
    ask(server, [*long, short[0]], 2)
    server.flush(timeout=120)


def run(args: argparse.Namespace, report: Report) -> None:
    on_gpu = args.device == "cuda"
    if on_gpu and torch.accelerator.device_count() < args.tp:
        raise Refused(f"--tp {args.tp}: this host has fewer GPUs")
    is_known = on_gpu and args.tp == 1 and args.weights == "bf16"
    costs = h200_costs(args.layers) if is_known else None
    said = {name: expected(args, costs, l2=name == "+ L2") for name in ("GPU only", "+ L2")}
    shape = Conversations(
        clients=args.clients, rounds=args.rounds, request_len=args.request_length,
        output_len=args.output_length, request_rate=args.request_rate, seed=args.seed,
    )  # fmt: skip
    found: dict[str, Talked] = {}
    with ExitStack() as stack:
        place = place_of(args, stack)
        servers = servers_of(args, place)
        vocabulary = np.arange(*place.vocabulary, dtype=np.uint32)
        stack.enter_context(started(servers, report))
        for name, server in servers.items():
            warm_up(server, args, place)
            found[name] = Talked(*talk([server.url], vocabulary, shape, barrier=True))
            server.kill()
            add_talk_figures(report, name, found[name], said[name])
    errors = error_counts([one for each in found.values() for turn in each.rounds for one in turn])
    if errors:
        raise Failed("; ".join(f"{count} requests failed: {why}" for why, count in errors.items()))
    add_ratios(report, found, said if costs else {})


def add_ratios(report: Report, found: dict[str, Talked], said: dict[str, Talked]) -> None:
    """Figures of the server with L2 over those of the other."""

    def ratios(of: dict[str, Talked]) -> dict[str, float]:
        less, more = of["GPU only"], of["+ L2"]
        mean = "mean_ttft_ms"
        return {
            "mean_ttft_ratio": more.figures(slice(None))[mean] / less.figures(slice(None))[mean],
            "output_throughput_ratio": less.seconds / more.seconds,
        }

    forecast = ratios(said) if said else {}
    for name, ratio in ratios(found).items():
        report.add(name, ratio, "ratio", {"of": "L2"}, expected=forecast.get(name))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_talk(parser)
    parser.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="format")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each server")


_QUICK: Final = {
    "device": "cpu", "clients": 4, "rounds": 4, "request_length": 128, "output_length": 128,
    "request_rate": float("inf"), "l1": 2048, "states": 24, "track_interval": 64,
}  # fmt: skip
COMMAND: Final = Command(run=run, add_options=add_options, devices=("cuda", "cpu"), quick=_QUICK)

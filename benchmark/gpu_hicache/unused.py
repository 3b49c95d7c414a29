"""Cost of L2 and L3 where nothing hits, over HTTP.

Qwen3-8B's shape with dummy weights; L3 is a Mooncake Store on this host. Three servers (no HiCache;
L2; L2 and L3) on the same GPU get the same load in turn, round by round, because clocks and
neighbours drift. Only one server works at a time. Prompts are random, so that every page is written
to the lower tiers and none is ever read. Figures are ratios to the server without HiCache in the
same round; the target for their medians is 2% around 1. Needs about 100 GB of host memory.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmark.command import Command
from benchmark.gpu_hicache.local_store import L3, add_store_option, clear_store, local_store
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import VOCABULARY, UnusedLoad, compare_unused, started
from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer

MEMORY: Final = ("--device", "cuda", *DUMMY_FLAGS, "--page-size", "64",
                 "--max-total-tokens", "98304")  # fmt: skip
L2: Final = ("--enable-hierarchical-cache", "--hicache-size", "12")
EXPECTED_RATIO: Final = {"+ L2": 0.985, "+ Mooncake": 0.98}


def run(args: argparse.Namespace, report: Report) -> None:
    flags = {"GPU only": MEMORY, "+ L2": (*MEMORY, *L2), "+ Mooncake": (*MEMORY, *L2, *L3)}
    unused = UnusedLoad(
        prompt=lambda seed, length: random_prompt(seed, length, *VOCABULARY), rounds=args.repeats
    )
    with dummy_model() as model, local_store(args.store, report) as store:
        servers = {name: EngineServer(*own, model=model, env=store.env)
                   for name, own in flags.items()}  # fmt: skip
        with started(servers, report):
            compare_unused(servers, unused, EXPECTED_RATIO, report)
            if store.is_standalone:
                clear_store(servers["+ Mooncake"], report)


COMMAND: Final = Command(run=run, add_options=add_store_option, repeats=4, devices=("cuda",))

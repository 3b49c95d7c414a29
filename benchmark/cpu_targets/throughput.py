"""Throughput: a batch against transformers and single requests, and the cost of unused tiers."""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack

from benchmark.cpu_targets.peers import TransformersPeer, output_speed
from benchmark.cpu_targets.rows import VOCABULARY, Figure, Outcome
from benchmark.prompts import random_prompts
from benchmark.timing import median_ratio
from rigs.servers.engine_server import EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster

BATCH = 16
INPUT_TOKENS = 256
NEW_TOKENS = 64


def batch(quick: bool) -> Outcome:
    """16 prompts: at once, one by one, and as one batch of `transformers.generate`."""
    rounds = 2 if quick else 5
    raw: dict[str, list[float]] = {"together": [], "one_by_one": [], "transformers": []}
    with ExitStack() as stack:
        server = stack.enter_context(EngineServer("--log-level", "warning"))
        peer = stack.enter_context(TransformersPeer())
        for turn in range(rounds + 1):
            prompts = random_prompts(10 + turn, 2 * BATCH, INPUT_TOKENS, *VOCABULARY)
            together, apart = prompts[:BATCH], prompts[BATCH:]
            seconds = peer.ask("generate", together, NEW_TOKENS)
            speeds = {
                "transformers": BATCH * NEW_TOKENS / seconds,
                "together": output_speed(server.url, together, NEW_TOKENS, BATCH),
                "one_by_one": output_speed(server.url, apart, NEW_TOKENS, 1),
            }
            for name, speed in speeds.items():
                if turn:
                    raw[name].append(speed)
    return Outcome(
        [
            Figure("16 at once over transformers.generate",
                   median_ratio(raw["together"], raw["transformers"]), 1.0, "at least"),
            Figure("16 at once over one by one",
                   median_ratio(raw["together"], raw["one_by_one"]), 4.0, "at least"),
        ],
        {
            **{f"{n}_tokens_s": statistics.median(v) for n, v in raw.items()},
            **{f"raw_{name}_tokens_s": values for name, values in raw.items()},
        },
    )  # fmt: skip


def unused_tiers(quick: bool) -> Outcome:
    """Prompts that nothing ever reuses, with pages of 64: with L2 and L3, and without.

    Many short rounds in turn, because the machine's other load changes within seconds.
    """
    rounds = 5 if quick else 80
    concurrency, count, tokens, new_tokens = 8, 12, 1000, 32
    raw: dict[str, list[float]] = {"with": [], "without": []}
    flags = ("--log-level", "warning", "--max-total-tokens", "16384", "--page-size", "64")
    with ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster(segment_size="512mb"))
        plain = stack.enter_context(EngineServer(*flags, "--enable-metrics"))
        tiers = stack.enter_context(
            EngineServer(
                *flags,
                "--hicache-storage-backend",
                "mooncake",
                "--enable-metrics",
                env=cluster.engine_env(),
            )
        )
        servers = {"with": tiers, "without": plain}
        for turn in range(rounds + 1):
            for name in ("with", "without") if turn % 2 else ("without", "with"):
                prompts = random_prompts(100 + turn, count, tokens, *VOCABULARY)
                speed = output_speed(servers[name].url, prompts, new_tokens, concurrency)
                if turn:
                    raw[name].append(speed)
        metrics = tiers.metrics()
    written = metrics.get("sglang:backuped_tokens_total", 0.0)
    logs = [math.log(a / b) for a, b in zip(raw["with"], raw["without"], strict=True)]
    return Outcome(
        [
            Figure("throughput lost to HiCache with L3 where nothing hits",
                   1 - math.exp(statistics.mean(logs)), 0.05, "at most", "share"),
        ],
        {
            "standard_error": statistics.stdev(logs) / len(logs) ** 0.5,
            **{f"{n}_tokens_s": statistics.median(v) for n, v in raw.items()},
            "tokens_written_to_l3": written,
            **{f"raw_{name}_tokens_s": values for name, values in raw.items()},
        },
    )  # fmt: skip

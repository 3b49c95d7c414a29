"""Resident memory of all processes after many requests, against after the first tenth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import psutil

from benchmark.cpu_targets.rows import VOCABULARY, Figure, Outcome
from benchmark.posting import post_all
from benchmark.prompts import random_prompts
from rigs.servers.engine_server import EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster

_MB = 1e6
_PROMPT_TOKENS = 80
"""One page of 64 and a rest: each request writes a page to L2 and L3."""
_CONCURRENCY = 32
_PARAMS = {"max_new_tokens": 2, "temperature": 0}


def growth(quick: bool) -> Outcome:
    """Engine with three tiers, each full long before the first look; master and store node too."""
    total = 2000 if quick else 10_000
    first = total // 10
    with ExitStack() as stack:
        # 1,000 pages overfill every tier: L1 has 64 pages, L2 128, the store 32 MiB.
        cluster = stack.enter_context(MooncakeCluster(segment_size="32mb"))
        server = stack.enter_context(
            EngineServer(
                "--hicache-storage-backend", "mooncake", "--log-level", "error",
                "--max-total-tokens", "4096", env=cluster.engine_env(),
            )
        )  # fmt: skip
        roots = [server.process.pid, cluster.master.pid, *(node.pid for node in cluster.nodes)]
        seen = {}
        done = 0
        for goal in (first, total // 2, total):
            prompts = random_prompts(goal, goal - done, _PROMPT_TOKENS, *VOCABULARY)
            bodies = [
                msgspec.json.encode({"input_ids": prompt, "sampling_params": _PARAMS})
                for prompt in prompts
            ]
            post_all(server.url, bodies, _CONCURRENCY)
            done = goal
            server.flush()
            seen[goal] = resident(roots)
    grown = sum(seen[total].values()) - sum(seen[first].values())
    return Outcome(
        [Figure(f"growth from {first} to {total} requests", grown, 20.0, "at most", "MB")],
        {"resident_mb_after": {str(count): by_name for count, by_name in seen.items()}},
    )


def resident(roots: Sequence[int]) -> dict[str, float]:
    """MB (10^6 bytes) of each process of the trees below `roots`, by place and name."""
    sizes: dict[str, float] = {}
    for root in roots:
        top = psutil.Process(root)
        for index, process in enumerate([top, *top.children(recursive=True)]):
            name = f"{len(sizes)}:{_short(process)}{'' if index else ' (root)'}"
            sizes[name] = round(process.memory_info().rss / _MB, 1)
    return sizes


def _short(process: psutil.Process) -> str:
    words = process.cmdline()
    for word in words:
        if word.startswith(("sglang", "mooncake")) or "mooncake_master" in word:
            return word.rsplit("/", 1)[-1]
    return "spawned" if any("spawn_main" in word for word in words) else process.name()

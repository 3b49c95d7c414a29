"""First token of a prompt of 4,000: computed, from L2, from L3; beside transformers' prefill."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from benchmark.cpu_targets.peers import StreamClient, TransformersPeer
from benchmark.cpu_targets.rows import VOCABULARY, Figure, Outcome
from benchmark.prompts import random_prompts
from benchmark.timing import median_ratio
from rigs.servers.engine_server import EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster

PROMPT_TOKENS = 4000
_EVICTING = 2
"""Prompts after which L1 holds nothing of earlier ones."""
_L1_TOKENS = 8704


def cold(quick: bool) -> Outcome:
    """Server with default flags, and transformers, in turn."""
    rounds = 4 if quick else 12
    ours: list[float] = []
    theirs: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(EngineServer("--log-level", "warning"))
        peer = stack.enter_context(TransformersPeer())
        client = StreamClient(server.url)
        for turn, prompt in enumerate(random_prompts(1, rounds + 2, PROMPT_TOKENS, *VOCABULARY)):
            seconds, cached = client.first_token(prompt)
            assert not any(cached[tier] for tier in ("device", "host", "storage")), cached
            reference = peer.ask("prefill", [prompt])
            if turn >= 2:
                ours.append(seconds)
                theirs.append(reference)
        about = peer.about
    ratio = median_ratio(ours, theirs)
    return Outcome(
        [Figure("cold TTFT over transformers' prefill", ratio, 1.3, "at most")],
        {
            "ttft_ms": statistics.median(ours) * 1000,
            "transformers_ms": statistics.median(theirs) * 1000,
            "transformers": about,
            "raw_ttft_s": ours,
            "raw_transformers_s": theirs,
        },
    )


def hits(quick: bool) -> Outcome:
    """One prompt after another: computed; evicted to L2, asked again; flushed, asked again."""
    rounds = 3 if quick else 10
    raw: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "storage": []}
    with ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster(segment_size="256mb"))
        server = stack.enter_context(
            EngineServer(
                "--hicache-storage-backend", "mooncake", "--log-level", "warning",
                "--max-total-tokens", str(_L1_TOKENS), "--hicache-ratio", "3",
                env=cluster.engine_env(),
            )
        )  # fmt: skip
        client = StreamClient(server.url)
        count = (rounds + 1) * (1 + _EVICTING)
        prompts = iter(random_prompts(2, count, PROMPT_TOKENS, *VOCABULARY))
        for turn in range(rounds + 1):
            prompt = next(prompts)
            seen = {"cold": client.first_token(prompt), "device": client.first_token(prompt)}
            for _ in range(_EVICTING):
                client.first_token(next(prompts))
            seen["host"] = client.first_token(prompt)
            server.flush()
            seen["storage"] = client.first_token(prompt)
            for tier, (seconds, cached) in seen.items():
                share = 0.0 if tier == "cold" else cached[tier] / PROMPT_TOKENS
                assert tier == "cold" or share > 0.97, f"{tier}: {cached}"
                if turn:
                    raw[tier].append(seconds)
    return Outcome(
        [
            Figure("TTFT of an L2 hit over cold", median_ratio(raw["host"], raw["cold"]), 0.12,
                   "at most"),
            Figure("TTFT of an L3 hit over cold", median_ratio(raw["storage"], raw["cold"]), 0.20,
                   "at most"),
        ],
        {
            **{f"{t}_ms": statistics.median(v) * 1000 for t, v in raw.items()},
            **{f"raw_{tier}_s": values for tier, values in raw.items()},
        },
    )  # fmt: skip

"""The planner's hit rates against an engine that serves the same conversations."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import pytest

import sglang
from rigs.servers.forked_servers import forking_engines
from sglang.benchmark.workload import TokenMaker, TraceRequest
from sglang.planning.hit_rates import stack_distances
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-b-test-cpu")

BLOCK: Final = 512
PAGE: Final = 4
"""Tokens of a page of the engine, which is a block of the trace."""
CONVERSATIONS: Final = 12
TURNS: Final = 80
NEW_BLOCKS: Final = 6
"""Blocks that a turn adds."""
L1_PAGES: Final = 160
RATIO: Final = 2


def conversations() -> list[TraceRequest]:
    """Turns of conversations in random order; a turn's last block is not repeated by the next."""
    choose = random.Random(3)
    known: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    requests = []
    for turn in range(TURNS):
        blocks = choose.choice(known)
        blocks.extend(range(NEW_BLOCKS * turn, NEW_BLOCKS * (turn + 1)))
        last = NEW_BLOCKS * TURNS + turn
        requests.append(TraceRequest(turn, (len(blocks) + 1) * BLOCK, 1, (*blocks, last)))
    return requests


def test_an_engine_finds_as_much_in_each_tier() -> None:
    trace = conversations()
    maker = TokenMaker(np.arange(300, 450, dtype=np.uint32), PAGE)
    found = {"device": 0, "host": 0}
    prompt_tokens = 0
    with forking_engines():
        made = sglang.Engine(
            device="cpu",
            page_size=PAGE,
            max_total_tokens=L1_PAGES * PAGE,
            max_running_requests=1,
            enable_hierarchical_cache=True,
            hicache_ratio=RATIO,
            log_level="warning",
        )
    with made as engine:
        for request in trace:
            ids = maker.prompt(request.hash_ids, len(request.hash_ids) * PAGE).tolist()
            answer = engine.generate(
                input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0}
            )
            details = answer["meta_info"]["cached_tokens_details"]
            for tier in found:
                found[tier] += details[tier]
            prompt_tokens += len(ids)
    distances = stack_distances(trace, BLOCK)
    device, both = found["device"], found["device"] + found["host"]
    # Each tier has something to find, and neither has all.
    assert 0.1 < device / prompt_tokens < 0.8 * both / prompt_tokens
    assert both / prompt_tokens < 0.95 * distances.hit_rate(float("inf"))
    for tokens, pages in ((device, L1_PAGES), (both, RATIO * L1_PAGES)):
        assert distances.hit_rate(pages * BLOCK) == pytest.approx(tokens / prompt_tokens, rel=0.1)

"""The forecast of reads from L3: by hand, and against a run on a GPU."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.models.published_configs import PUBLISHED
from sglang.benchmark.workload import TraceRequest, read_trace
from sglang.planning.hit_rates import stack_distances
from sglang.planning.machine import find_machine
from sglang.planning.model_costs import costs_of_rank
from sglang.planning.prefill_cost import PrefillCost
from sglang.planning.store_reads import tokens_read
from sglang.planning.tiers import ReadOrCompute, read_or_compute
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

EXCERPT: Final = Path(__file__).parents[4] / "benchmark/data/mooncake_synthetic_excerpt.jsonl"
BLOCK: Final = 512
COMPUTED: Final = 10_000.0
"""Tokens per second that the device computes."""


def request(at_s: float, *blocks: int) -> TraceRequest:
    """A prompt of `blocks`, then one block that no other prompt has."""
    own = -1 - int(at_s * 1000)
    return TraceRequest(at_s * 1e3, (len(blocks) + 1) * BLOCK, 1, (*blocks, own))


def read(
    trace: list[TraceRequest], rate: float, *, computed: float = COMPUTED, **changed: Any
) -> int:
    """Tokens from L3, if L1 and L2 have nothing, at `rate` tokens per second."""
    reads = ReadOrCompute(
        prefill=computed,
        compute_s={},
        load=math.inf,
        read=rate,
        longest_begun=None,
        longest_kept=None,
        break_even_bytes_per_s=0.0,
    )
    arguments: dict[str, Any] = {
        "l2_tokens": 0.0,
        "l3_tokens": math.inf,
        "threshold": 256,
        "always": False,
        **changed,
    }
    arrivals = [one.timestamp_ms / 1e3 for one in trace]
    return tokens_read(stack_distances(trace, BLOCK), arrivals, reads=reads, **arguments)


AGAIN: Final = [request(0, 1, 2), request(100, 1, 2)]
"""The second finds two blocks of its three."""


def test_a_fast_store_is_read_and_a_slow_one_is_not() -> None:
    # A read may take 1.25 times as long as computing, and 10 ms more.
    assert read(AGAIN, COMPUTED) == 2 * BLOCK
    just_as_fast = 2 * BLOCK / (1.25 * 2 * BLOCK / COMPUTED + 0.01)
    assert read(AGAIN, just_as_fast * 1.01) == 2 * BLOCK
    assert read(AGAIN, just_as_fast * 0.99) == 0


def test_a_read_that_looks_slow_before_its_hit_is_known_does_not_begin() -> None:
    """The store has one block of each prompt. Its read takes 8.4 ms more than 1.25 times computing
    it, which is within the slack of a cancellation."""
    found = []
    for new in ((), range(10, 15)):
        trace = [request(0, 1), request(100, 1, *new)]
        found.append(read(trace, 1e5 / 2.9, computed=1e5))
    assert found == [BLOCK, 0]


def test_wait_complete_reads_however_slow() -> None:
    assert read(AGAIN, 10.0, always=True) == 2 * BLOCK


def test_short_hits_are_computed_and_what_l2_has_is_not_read() -> None:
    assert read(AGAIN, 1e6, threshold=2 * BLOCK) == 2 * BLOCK
    assert read(AGAIN, 1e6, threshold=2 * BLOCK + 1) == 0
    assert read(AGAIN, 1e6, threshold=2 * BLOCK + 1, always=True) == 0
    assert read(AGAIN, 1e6, l2_tokens=math.inf) == 0
    assert read(AGAIN, 1e6, l3_tokens=0.0) == 0
    # The cache of two blocks has the first block at a distance of one, as the list begins with it.
    assert read(AGAIN, 1e6, l2_tokens=BLOCK) == BLOCK


def test_prompts_that_wait_for_the_device_make_a_slow_read_worth_its_time() -> None:
    slow = COMPUTED / 2
    long = request(99.9, *range(10, 30))
    assert read([AGAIN[0], AGAIN[1]], slow) == 0
    assert read([AGAIN[0], long, AGAIN[1]], slow) == 2 * BLOCK
    # The device is idle again when the request comes.
    assert read([AGAIN[0], request(50, *range(10, 30)), AGAIN[1]], slow) == 0


def test_reads_that_wait_for_others_are_slower() -> None:
    first = [request(0, *range(20)), request(10, *range(100, 120))]
    later = [request(100, *range(20)), request(100.001, *range(100, 120))]
    both = 2 * 20 * BLOCK
    assert read([*first, later[0], dataclasses.replace(later[1], timestamp_ms=2e5)], 9e3) == both
    assert read([*first, *later], 9e3) == both / 2


def test_the_forecast_of_a_measured_run(tmp_path: Path) -> None:
    """`benchmark/results/2026-11-26-gpu-trace.md`: 55.4% of the prompts were found, 0.8% in L3. The
    run cut prompts to a quarter, so a token of it is four of the trace."""
    config = ModelConfig.from_path(str(PUBLISHED["Qwen3-8B"].write(tmp_path)))
    reads = read_or_compute(
        find_machine("h200", torch.bfloat16, device="auto", num_ranks=1),
        costs_of_rank(config, torch.bfloat16, tp_size=1, formats=None),
        prefill_s=lambda tokens: PrefillCost(config).operations(tokens) / 989e12,
    )
    trace = read_trace(EXCERPT)
    distances = stack_distances(trace, 4 * 64)
    seconds = trace[-1].timestamp_ms / 1e3
    in_l2 = 4 * 3 * 65_536
    found = tokens_read(
        distances,
        [82.0 / seconds * one.timestamp_ms / 1e3 for one in trace],
        l2_tokens=in_l2,
        l3_tokens=math.inf,
        reads=dataclasses.replace(reads, prefill=4 * reads.prefill, read=4 * reads.read),
        threshold=4 * 256,
        always=False,
    )
    share = found / distances.prompt_tokens
    assert share == pytest.approx(0.008, abs=0.004)
    assert distances.hit_rate(in_l2) + share == pytest.approx(0.554, rel=0.03)
    assert distances.hit_rate(math.inf) > 1.1 * 0.554, "pages that the store has"

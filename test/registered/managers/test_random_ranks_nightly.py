"""Random work on several ranks for most of an hour, compared at every tick.

Upstream's ranks came apart after thirty to forty minutes. See `random_ranks.py`: the seeds are
drawn and printed, and a failure's notes say how to repeat it.
"""

from __future__ import annotations

import secrets

import pytest
import torch

from rigs.schedulers.random_ranks import run_for
from rigs.schedulers.random_requests import Extra
from rigs.schedulers.random_seeds import print_counts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2950, suite="nightly-test-cpu", nightly=True)

TICKS = 20_000
SECONDS = 45 * 60.0
WORK = (
    "tokens from host",
    "tokens from storage",
    "evicted from host",
    "write landed",
    "steps from a state of the tree",
    "drafts accepted",
    "drafts rejected",
    *(f"with {extra}" for extra in Extra),
)
RARE_WORK = ("read late", "read failed", "retractions", "states evicted from host")
"""Work that must have happened; for the rare kinds 20,000 ticks may be too few."""


@pytest.mark.timeout(1800)
def test_ranks_that_split_heads_and_prompts_agree_for_20000_ticks() -> None:
    torch.set_num_threads(1)
    counts = run_for(0.0, secrets.randbits(31), [(4, 2)], least_ticks=TICKS)
    assert counts["ticks"] >= TICKS
    for what in WORK:
        assert counts[what], f"no {what} in {counts['seeds']} seeds"


@pytest.mark.timeout(SECONDS + 600.0)
def test_ranks_of_all_sizes_agree_for_45_minutes() -> None:
    torch.set_num_threads(1)
    counts = run_for(SECONDS, secrets.randbits(31))
    print_counts(counts)
    for what in (*WORK, *RARE_WORK):
        assert counts[what] > 10, what

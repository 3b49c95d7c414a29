"""Ranks of which each is short of memory at random go on with equal states (row C15)."""

from __future__ import annotations

from collections import Counter

import pytest

from rigs.schedulers.random_ranks import RandomRanks
from rigs.schedulers.random_setup import impatient
from rigs.schedulers.short_memory import (
    BUFFER_OF_A_COPY,
    BUFFER_OF_L3,
    CLIENT,
    THREAD,
    ShortMemory,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

TICKS = 300
CHANCE = 0.1
LEAST_RUNS, MOST_RUNS = 2, 40
"""Bounds on runs of three tiers, which go on until all has happened that must."""
SEEDS = (14, 13, 2, 11, *range(15, 200))
"""The first ones read and write most in L3, in the shortest time."""


@pytest.mark.parametrize(
    ("sites", "work"),
    [
        ((BUFFER_OF_A_COPY, BUFFER_OF_L3), ("tokens from host", "tokens from storage")),
        ((CLIENT, THREAD), ("refused", "write landed")),
    ],
    ids=["buffers", "clients and threads"],
)
def test_allocations_that_fail_on_one_rank_alone_leave_the_ranks_equal(
    sites: tuple[str, ...], work: tuple[str, ...]
) -> None:
    counts: Counter[str] = Counter()
    runs = 0
    for seed in SEEDS:
        has_all = all(counts[what] for what in (*sites, *work))
        if runs == MOST_RUNS or (runs >= LEAST_RUNS and has_all):
            break
        ranks = 2 + seed % 2
        memory, run = ShortMemory(sites, CHANCE, seed), RandomRanks(seed, ranks)
        if run.setup.tiers == 3:
            runs += 1
            try:
                with impatient(), memory.on_all_ranks():
                    counts += run.run(TICKS).counts + memory.failed
            except BaseException as error:
                error.add_note(f"with seed {seed} and {ranks} ranks")
                raise
    for what in (*sites, *work):
        assert counts[what], f"no {what} in {runs} runs"

"""20,000 random steps with drafts for each kind of state: of one scheduler, of two ranks, and of
prefill and decode apart.

See `random_scheduler.py`, `random_ranks.py` and `random_pd.py`. The seeds are drawn among those of
the kind, and printed; what fails is printed with the command that repeats it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import pytest
import torch

from rigs.disaggregation import random_pd
from rigs.schedulers import random_scheduler
from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.random_ranks import run_ranks
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import Setup
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1200, suite="nightly-test-cpu", nightly=True)

STEPS: Final = 20_000
STEPS_PER_SEED: Final = 600


def kind_of(state: CheckableState) -> str:
    if state.num_states:
        return "states"
    return "sparse" if state.is_sparse else "dense"


def drawn_setup(seed: int) -> tuple[CheckableState, int]:
    """State and draft tokens per step that `seed` draws, for one scheduler and for ranks alike."""
    setup = Setup.draw(random.Random(seed))
    return setup.state, setup.num_draft_tokens


def drawn_pd(seed: int) -> tuple[CheckableState, int]:
    run = random_pd.RandomPd(seed)
    return run.state, run.num_draft_tokens


DRIVERS: Final[
    dict[str, tuple[Callable[[int], tuple[CheckableState, int]], Callable[[int], Outcome]]]
] = {
    "scheduler": (drawn_setup, partial(random_scheduler.run_seed, steps=STEPS_PER_SEED)),
    "ranks": (drawn_setup, partial(run_ranks, ranks=2, steps=STEPS_PER_SEED)),
    "prefill and decode": (drawn_pd, partial(random_pd.run_seed, steps=STEPS_PER_SEED)),
}


def seeds_of(kind: str, drawn: Callable[[int], tuple[CheckableState, int]]) -> Iterator[int]:
    """Seeds that draw this kind of state, and drafts."""
    seed = secrets.randbits(31)
    while True:
        seed += 1
        state, num_draft_tokens = drawn(seed)
        if num_draft_tokens > 1 and kind_of(state) == kind:
            yield seed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["dense", "sparse", "states"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_drafts_keep_every_invariant_for_20000_steps(driver: str, kind: str) -> None:
    torch.set_num_threads(1)
    drawn, run_seed = DRIVERS[driver]
    done, accepted = 0, 0
    for seed in seeds_of(kind, drawn):
        print(f"{driver}, {kind}, seed {seed}", flush=True)
        outcome = run_seed(seed)
        done += outcome.steps
        accepted += outcome.counts["drafts accepted"] + outcome.counts["decode: accepted drafts"]
        if done >= STEPS:
            break
    print(f"{driver}, {kind}: {done} steps, {accepted} accepted drafts", flush=True)
    # Most ticks of a pair of servers wait for each other.
    assert accepted > STEPS // (50 if driver == "prefill and decode" else 10)

"""Random work on a whole scheduler for twenty minutes: see `random_scheduler.py`.

The first seed is drawn, so that each night sees others; each is printed before its run,
and what fails with the command that repeats it.
"""

from __future__ import annotations

import pytest

from rigs.schedulers.random_requests import Extra
from rigs.schedulers.random_scheduler import run_seed
from rigs.schedulers.random_seeds import assert_random_work
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1200, suite="nightly-test-cpu", nightly=True)

SECONDS = 1190.0


@pytest.mark.timeout(SECONDS + 600.0)
def test_twenty_minutes_of_random_work() -> None:
    # The run must cover every event that it exists to test.
    happened = (
        "tokens from device",
        "tokens from host",
        "tokens from storage",
        "retractions",
        "evicted from device",
        "evicted from host",
        "read damaged",
        "read late",
        "read failed",
        "write failed",
        "aborted after 0 words",
        "aborted after 1 words",
        "prompts with logprobs",
        "prompts cached whole",
        "ended by stop",
        "steps from a state of the tree",
        "snapshots of prefill/taken",
        "snapshots of decode/taken",
        "snapshots of prefill/no_slot",
        "states evicted from device",
        "states evicted from host",
        "drafts accepted",
        "drafts rejected",
        "verifications ahead",
        *(f"with {extra}" for extra in Extra),
        "with two demands",
        "with sessions",
    )
    assert_random_work(SECONDS, run_seed, happened)

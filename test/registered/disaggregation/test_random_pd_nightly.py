"""Random work on a prefill and a decode scheduler for ten minutes: see `random_pd.py`.

The first seed is drawn, so that each night sees others; each is printed before its run, and what
fails with the command that repeats it.
"""

from __future__ import annotations

import pytest

from rigs.disaggregation.nixl_package import has_nixl
from rigs.disaggregation.random_pd import run_seed
from rigs.schedulers.random_requests import Extra
from rigs.schedulers.random_seeds import assert_random_work
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(900)
def test_ten_minutes_of_random_work() -> None:
    # Everything that it is for has happened.
    happened = (
        "decode: right",
        "decode: failed",
        "decode: aborted",
        "decode: refused",
        "decode: retractions",
        "decode: retracted tokens, kept",
        "decode: accepted drafts",
        "decode: rejected drafts",
        *(f"decode: with {extra}" for extra in Extra),
        "prefill: failed",
        "operator: done",
        "operator: refused",
        "operator: pauses",
        "messages lost",
        "messages doubled",
        "rooms forgotten",
        "role switches",
        "prefill: restarts",
        "decode: restarts",
        "with groups",
        "real models",
        "rounds with faults",
        "rounds without",
        *(("over NIXL",) if has_nixl() else ()),
    )
    assert_random_work(590.0, run_seed, happened)

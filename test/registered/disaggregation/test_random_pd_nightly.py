"""Random work on a prefill and a decode scheduler for ten minutes: see `sglang.test.random_pd`.

The first seed is drawn, so that each night sees others; each is printed before its run, and what
fails with the command that repeats it.
"""

from __future__ import annotations

import secrets

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.random_pd import run_for

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(900)
def test_ten_minutes_of_random_work() -> None:
    torch.set_num_threads(1)
    counts, failed = run_for(590.0, secrets.randbits(31))
    print("\n".join(f"{n:10} {what}" for what, n in sorted(counts.items())))
    assert not failed
    # None of what it is for has been left out.
    for what in (
        "decode: right",
        "decode: failed",
        "decode: aborted",
        "decode: refused",
        "decode: retractions",
        "prefill: failed",
        "messages lost",
        "messages doubled",
        "rooms forgotten",
        "rounds with faults",
        "rounds without",
    ):
        assert counts[what] > 10, what


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-s"]))

"""Small runs of the benchmarks that start servers of their own."""

from __future__ import annotations

import pytest

from rigs.servers.forked_benchmarks import run
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=400, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        "cpu-targets --rows cold scheduler",
        "remote-weights tcp",
        "remote-weights nvlink",
        "gpu-pd servers",
        "gpu-ranks ttft",
        "gpu-ranks unused",
    ],
)
def test_small_runs_have_figures(words: str) -> None:
    cases = run(*words.split(), "--quick")
    assert cases and all(one["details"] for one in cases)


@pytest.mark.timeout(600)
def test_words_are_the_same_from_the_tiers() -> None:
    cases = run("words-by-tier", "same", "--quick")
    assert [one["from"] for one in cases] == ["cold", "L1", "L2"]
    assert all(one["equal"] for one in cases)


@pytest.mark.timeout(600)
def test_recall_is_the_same_from_the_first_tier() -> None:
    cold, l1 = run("words-by-tier", "recall", "--quick")
    assert cold["from_device"] == 0 < l1["from_device"]
    assert cold["score"] == l1["score"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""Small runs of the benchmarks that start servers of their own."""

from __future__ import annotations

import pytest

from rigs.servers.forked_benchmarks import run
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        "cpu-targets --rows cold scheduler",
        "remote-weights tcp",
        "remote-weights nvlink",
        "gpu-pd servers",
        "gpu-pd turns",
        "gpu-ranks ttft",
        "gpu-ranks unused",
        "gpu-ranks groups",
    ],
)
def test_small_runs_have_figures(words: str) -> None:
    cases = run(*words.split(), "--quick")
    assert cases and all(one["details"] for one in cases)


@pytest.mark.timeout(600)
def test_the_run_of_eight_gpus_is_whole_on_two_ranks() -> None:
    cases = run("gpu-eight", "--quick")
    of_tier = {(one["tokens"], one["from"]): one for one in cases if "from" in one}
    assert len(of_tier) == 2 * 4
    for (tokens, source), found in of_tier.items():
        most = 3 * (tokens - 1)
        assert found["cached_from_host"] == (most if source.startswith("L2") else 0), source
        assert found["cached_from_storage"] == (most if source == "Mooncake" else 0), source
    loads = [one["load"] for one in cases if "load" in one]
    assert loads == ["turns", "trace", "unused", "unused", "unused", "throughput"]
    assert [one["decode"] for one in cases if "decode" in one] == [1, 4]
    (hidden,) = (one for one in cases if "agreement_hidden" in one)
    assert 0 <= hidden["agreement_hidden"] <= 1
    assert sum("transfer_not_hidden" in one for one in cases) == 2, "prefill and decode apart"


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

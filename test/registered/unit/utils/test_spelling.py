"""Suggestions for misspelt names: one typing error, and never another name."""

from __future__ import annotations

import pytest

from sglang.srt.utils.spelling import did_you_mean, near_misspelling
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

KNOWN = ("--page-size", "--dp-size", "--log-requests", "--hicache-ratio", "lru", "glm45", "rdma")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--page-siz", "--page-size"),
        ("--page-sizes", "--page-size"),
        ("--page-sixe", "--page-size"),
        ("--paeg-size", "--page-size"),
        ("--pagesize", "--page-size"),
        ("PAGE_SIZE", "--page-size"),
        ("--hi-cache-ratio", "--hicache-ratio"),
        ("rmda", "rdma"),
        ("--page-siez", "--page-size"),
        ("--pgae-siez", None),
        ("--page-xyze", None),
        ("--dcp-size", None),
        ("--tp-size", None),
        ("--size-dp", None),
        ("--page", None),
        ("--log-requests-level", None),
        ("lfu", None),
        ("glm47", None),
        ("glm", None),
        ("--", None),
        ("", None),
    ],
)
def test_a_name_is_suggested_for_one_typing_error(name: str, meant: str | None) -> None:
    assert near_misspelling(name, KNOWN) == meant
    assert did_you_mean(name, KNOWN) == ("" if meant is None else f"; did you mean {meant}?")


def test_a_long_word_of_a_stranger_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def sub(pattern: str, by: str, word: str) -> str:
        sizes.append(len(word))
        return word

    monkeypatch.setattr("sglang.srt.utils.spelling.re.sub", sub)
    assert near_misspelling("--page-" + "size" * 4000, KNOWN) is None
    assert max(sizes, default=0) < 100

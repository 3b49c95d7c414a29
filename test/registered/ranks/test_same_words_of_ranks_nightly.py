"""The words of one rank from two, from eight, which have a head each, and from four times two."""

from __future__ import annotations

from pathlib import Path

from rigs.words_of_ranks import assert_same_words
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=50, suite="nightly-test-cpu", nightly=True)


def test_two_ranks_say_what_one_rank_says(tmp_path: Path) -> None:
    """`test_same_words_of_ranks.py` has two ranks of other families."""
    assert_same_words(tmp_path, "qwen3", ((1, 1), (2, 1)))


def test_eight_ranks_say_what_one_rank_says(tmp_path: Path) -> None:
    assert_same_words(tmp_path, "deepseek_v32", ((1, 1), (8, 1), (8, 2)))

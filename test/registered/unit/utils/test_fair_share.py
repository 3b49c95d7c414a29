"""Shares of a resource that strangers use side by side."""

from __future__ import annotations

import pytest

from sglang.srt.utils.fair_share import is_within_share
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("own", "need", "free", "is_within"),
    [(0, 80, 100, True), (0, 81, 100, False), (10, 10, 15, True), (10, 10, 14, False)],
)
def test_one_user_has_at_most_four_times_what_stays_free(
    own: int, need: int, free: int, is_within: bool
) -> None:
    assert is_within_share(own, need, free) is is_within

"""combine_extra_key: different pairs give different keys (row C6); split_extra_key undoes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.messages.cache_key import combine_extra_key, split_extra_key
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PART = st.none() | st.text(alphabet="se0123:;a\x00é", max_size=12)


@given(PART, PART, PART, PART)
@settings(max_examples=500, deadline=None)
def test_equal_keys_mean_equal_parts(
    a: str | None, b: str | None, c: str | None, d: str | None
) -> None:
    same = combine_extra_key(a, b) == combine_extra_key(c, d)
    assert same == ((a, b) == (c, d))
    assert split_extra_key(combine_extra_key(a, b)) == (a, b)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("a", "b"), ("as1:b", None)),
        (("a", None), (None, "a")),
        (("", None), (None, None)),
        (("1:a", "b"), ("1", "a1:b")),
    ],
)
def test_crafted_parts_do_not_collide(
    left: tuple[str | None, str | None], right: tuple[str | None, str | None]
) -> None:
    assert combine_extra_key(*left) != combine_extra_key(*right)


def test_two_absent_parts_give_no_key() -> None:
    assert combine_extra_key(None, None) is None
    assert split_extra_key(None) == (None, None)


@pytest.mark.parametrize(
    "key", ["", "a", "e1", "e2:a", "s1:ae1:b", "e1:ae1:b", "e01:a", "e1:ab", "e\u0661:a"]
)
def test_other_keys_are_not_split(key: str) -> None:
    """Callers of the cache may have keys of their own."""
    assert split_extra_key(key) is None

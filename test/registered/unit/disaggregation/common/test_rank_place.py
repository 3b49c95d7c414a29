"""Which ranks of two servers talk to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.common.geometry import RankPlace
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def sources(decode: tuple[int, int], prefill: tuple[int, int]) -> list[list[int]]:
    """For each decode rank its prefill ranks. A server is (ranks, attention TP)."""
    return [RankPlace(rank, *decode).partners(RankPlace(0, *prefill)) for rank in range(decode[0])]


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        ((1, 1), (1, 1), [[0]]),
        ((2, 2), (2, 2), [[0], [1]]),
        ((1, 1), (2, 2), [[0, 1]]),
        ((2, 2), (1, 1), [[0], [0]]),
        ((2, 2), (4, 4), [[0, 1], [2, 3]]),
        ((4, 4), (2, 2), [[0], [0], [1], [1]]),
        # Prompts split over two: ranks 0 and 2 have the same heads.
        ((2, 2), (4, 2), [[0, 2], [1, 3]]),
        ((1, 1), (2, 1), [[0, 1]]),
        # Neither divides the other: of six heads the ranks have 2 each, and 3 each.
        ((3, 3), (2, 2), [[0], [0, 1], [1]]),
    ],
)
def test_ranks_read_from_those_that_share_heads(
    decode: tuple[int, int], prefill: tuple[int, int], expected: list[list[int]]
) -> None:
    assert sources(decode, prefill) == expected


sizes = st.integers(1, 8)


@given(sizes, sizes, st.integers(1, 3))
def test_readers_are_the_other_side_of_sources(decode_tp: int, prefill_tp: int, cp: int) -> None:
    decode, prefill = (decode_tp, decode_tp), (prefill_tp * cp, prefill_tp)
    read = sources(decode, prefill)
    for rank in range(prefill_tp * cp):
        readers = RankPlace(rank, *prefill).partners(RankPlace(0, *decode))
        assert readers, "every prefill rank is asked"
        for reader in range(decode_tp):
            assert (reader in readers) == (rank in read[reader])

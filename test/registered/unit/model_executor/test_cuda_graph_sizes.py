"""Batch sizes that are captured."""

from __future__ import annotations

import itertools

import pytest

from sglang.srt.model_executor.cuda_graph_runner import graph_batch_sizes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("asked", "running", "sizes"),
    [
        (None, 3, [1, 2, 3]),
        (5, 300, [1, 2, 4, 5]),
        (20, 300, [1, 2, 4, 8, 16, 20]),
        (1, 9, [1]),
        (64, 9, [1, 2, 4, 8, 9]),
    ],
)
def test_sizes_double(asked: int | None, running: int, sizes: list[int]) -> None:
    assert graph_batch_sizes(asked, running) == sizes


def test_padding_is_an_eighth_at_most() -> None:
    sizes = graph_batch_sizes(None, 1000)
    assert (sizes[-1], len(sizes)) == (256, 26)
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - (smaller + 1) <= max(7, (smaller + 1) / 8)


def test_none_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph-max-bs 0"):
        graph_batch_sizes(0, 8)

"""Plans of prefills for kernels, by hand: bounds, chunks, and what pads a captured plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.linear_attention.extend_plan import (
    SHORT,
    ChunkPlan,
    ShortPlan,
    kernel_plan_of,
    token_bounds_of,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def batch_of(*num_new: int) -> Any:
    states = SimpleNamespace(plan=None, track_lens_cpu=None)
    ids = torch.zeros(sum(num_new))
    return SimpleNamespace(states=states, extend_seq_lens_cpu=list(num_new), input_ids=ids)


def test_a_short_plan_has_bounds_and_snapshots() -> None:
    plan = ShortPlan.of([3, 2], [1, 0], "cpu")
    assert [one.tolist() for one in plan] == [[0, 3, 5], [1, 0]]
    padded = ShortPlan.of([3, 2], None, "cpu", num_requests=4)
    assert [one.tolist() for one in padded] == [[0, 3, 5, 5, 5], [0, 0, 0, 0]]


def test_chunks_begin_again_behind_a_snapshot() -> None:
    plan = ChunkPlan.of([130, 5, 64], [64, 0, 1], "cpu", chunk=64)
    assert [one.tolist() for one in plan.tensors] == [
        [0, 130, 135, 199], [64, 0, 1], [0, 0, 0, 1, 2, 2], [0, 3, 4, 6],
    ]  # fmt: skip
    assert plan.chunks.size == 64


def test_a_padded_plan_ends_with_chunks_without_tokens() -> None:
    """They count as chunks of the last request."""
    plan = ChunkPlan.of([130, 5], None, "cpu", chunk=64, padded=(3, 6))
    assert [one.tolist() for one in plan.tensors] == [
        [0, 130, 135, 135], [0, 0, 0], [0, 0, 0, 1, 2, 2], [0, 3, 4, 4],
    ]  # fmt: skip
    full = ChunkPlan.of([130, 5], None, "cpu", chunk=64, padded=(2, 6))
    assert full.chunks.requests.tolist() == [0, 0, 0, 1, 1, 1]
    assert full.chunks.first_chunks.tolist() == [0, 3, 4]


@pytest.mark.parametrize(("tokens", "kind"), [(SHORT, ShortPlan), (SHORT + 1, ChunkPlan)])
def test_a_step_has_one_plan_by_its_length(tokens: int, kind: type) -> None:
    batch = batch_of(tokens - 1, 1)
    bounds = token_bounds_of(batch)
    assert bounds.tolist() == [0, tokens - 1, tokens] and batch.states.plan is None
    plan = kernel_plan_of(batch)
    assert type(plan) is kind and kernel_plan_of(batch) is plan
    assert token_bounds_of(batch) is plan.bounds

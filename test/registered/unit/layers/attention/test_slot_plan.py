"""Plans of reading contexts: views, gathers, and that no token is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.attention.slot_plan import (
    DecodePlan,
    Run,
    Slots,
    longest_run,
    plan_decode,
    plan_extend,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


def slots(*runs: tuple[int, int]) -> Slots:
    """Slots of (first, count) runs, one after the other."""
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in runs])


def plan(contexts: list[Slots], page_size: int = 1, view_tokens: int = 100) -> DecodePlan:
    return plan_decode(
        contexts, page_size=page_size, view_tokens=view_tokens, dtype=torch.float32, device="cpu"
    )


def covered(plan: DecodePlan, row: int) -> list[int]:
    """The slots that the plan reads for `row`, ascending, padding left out."""
    found: list[int] = []
    for view in plan.views:
        if view.row == row:
            found.extend(range(view.slot, view.slot + view.length))
    for gather in plan.gathers:
        table = gather.slots.view(len(gather.rows), gather.width)
        for i, owner in enumerate(gather.rows):
            if owner == row:
                seen = table[i] if gather.mask is None else table[i][gather.mask[i, 0, 0] == 0]
                found.extend(seen.tolist())
    return sorted(found)


@pytest.mark.parametrize(
    ("context", "page_size", "run"),
    [
        (slots((5, 7)), 1, Run(0, 7, 5)),
        (slots((5, 3), (20, 6), (40, 2)), 1, Run(3, 9, 20)),
        (slots((8, 4), (32, 4), (36, 3)), 4, Run(4, 11, 32)),
        (slots((8, 1)), 4, Run(0, 1, 8)),
        (slots((8, 4), (4, 4)), 4, Run(0, 4, 8)),
    ],
)
def test_the_longest_run_is_found(context: Slots, page_size: int, run: Run) -> None:
    assert longest_run(context, page_size) == run


def test_long_runs_are_views_and_short_contexts_are_gathered_together() -> None:
    got = plan([slots((0, 30)), slots((1000, 150)), slots((50, 20))])
    assert [tuple(view) for view in got.views] == [(1, 1000, 150)]
    (gather,) = got.gathers
    assert (gather.rows, gather.width) == ([0, 2], 30)
    assert got.owners.tolist() == [1, 0, 2]
    assert got.order is not None
    assert got.order.tolist() == [1, 0, 2]
    assert not got.in_order


def test_a_context_alone_in_one_piece_is_a_view_however_short() -> None:
    got = plan([slots((7, 3))])
    assert [tuple(view) for view in got.views] == [(0, 7, 3)]
    assert got.gathers == []
    assert got.in_order


def test_a_long_run_with_a_tail_is_read_as_both() -> None:
    got = plan([slots((64, 128), (512, 64), (256, 5))], page_size=64)
    assert [tuple(view) for view in got.views] == [(0, 64, 128)]
    assert covered(got, 0) == sorted(slots((64, 128), (512, 64), (256, 5)).tolist())
    assert got.order is None


def test_unlike_lengths_are_not_padded_to_the_longest() -> None:
    scattered = slots(*[(i * 3, 1) for i in range(5000)])
    got = plan([scattered] + [slots((20000 + 50 * i, 40)) for i in range(15)], view_tokens=9999)
    assert [gather.width for gather in got.gathers] == [5000, 40]
    assert got.gathers[0].mask is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_token_is_read_exactly_once(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 4]))
    view_tokens = data.draw(st.integers(1, 40))
    lens = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    pages = data.draw(st.permutations(range(1, 80)))
    if data.draw(st.booleans()):
        pages = sorted(pages)
    contexts, used = [], 0
    for length in lens:
        count = -(-length // page_size)
        mine = np.array([pages[(used + i) % 79] for i in range(count)])
        used += count
        every = (mine[:, None] * page_size + np.arange(page_size)).reshape(-1)
        contexts.append(every[:length].astype(np.int32))
    got = plan(contexts, page_size=page_size, view_tokens=view_tokens)
    for row, context in enumerate(contexts):
        assert covered(got, row) == sorted(context.tolist())


def test_prefixes_are_runs_or_lists_of_slots() -> None:
    got = plan_extend(
        [slots((3, 0)), slots((3, 9)), slots((9, 2), (3, 1))], [4, 1, 2], page_size=1, device="cpu"
    )
    assert [(s.begin, s.end) for s in got] == [(0, 4), (4, 5), (5, 7)]
    assert (got[0].prefix_run, got[0].prefix_slots) == (None, None)
    assert got[1].prefix_run == Run(0, 9, 3)
    assert got[2].prefix_slots is not None
    assert got[2].prefix_slots.tolist() == [9, 10, 3]

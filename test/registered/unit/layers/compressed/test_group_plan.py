"""Plans of groups against their definition, on tokens that carry their request and position."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.layers.compressed.group_plan import GroupPlan, Span
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

Token = tuple[int, int]


class Kept:
    """What steps keep of earlier tokens: open groups and last groups, by request and place."""

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio
        self.opened: dict[Token, Token] = {}
        self.last: dict[Token, Token] = {}

    def step(self, spans: list[Span]) -> tuple[list[list[Token]], list[list[Token]]]:
        """Run a plan; returns the tokens of each finished group, and of the group before it, which
        is empty for a first group. Checks what the plan keeps."""
        plan = GroupPlan.of(spans, self.ratio, "cpu")
        tokens = [(i, s.prefix + n) for i, s in enumerate(spans) for n in range(s.new)]
        places = zip(plan.open_requests.tolist(), plan.open_places.tolist(), strict=True)
        sources = [*tokens, *(self.opened[place] for place in places)]
        lasts = zip(plan.last_requests.tolist(), plan.last_places.tolist(), strict=True)
        before = [*sources, *(self.last[place] for place in lasts)]
        current = [[sources[one] for one in group] for group in plan.current.tolist()]
        firsts = plan.is_first.flatten().tolist()
        previous = [
            [] if is_first else [before[one] for one in group]
            for group, is_first in zip(plan.previous.tolist(), firsts, strict=True)
        ]
        assert firsts == [group[0][1] == 0 for group in current]
        assert all(group[-1] in tokens for group in current)
        for request, group in zip(plan.ended.tolist(), plan.ended_sources.tolist(), strict=True):
            self.last |= {(request, n): sources[one] for n, one in enumerate(group)}
        for request, group in zip(
            plan.tracked.tolist(), plan.tracked_sources.tolist(), strict=True
        ):
            end = spans[request].prefix + spans[request].track
            found = [sources[one] for one in group]
            assert found == [(request, end - self.ratio + n) for n in range(self.ratio)]
        for token, request, place in zip(
            plan.kept_tokens.tolist(),
            plan.kept_requests.tolist(),
            plan.kept_places.tolist(),
            strict=True,
        ):
            self.opened[request, place] = tokens[token]
        return current, previous


@pytest.mark.parametrize("ratio", [2, 4, 5, 128])
@pytest.mark.parametrize("seed", range(5))
def test_groups_of_random_steps_have_their_tokens(ratio: int, seed: int) -> None:
    rng = random.Random(f"{ratio} {seed}")
    kept, lens = Kept(ratio), [0] * 4
    for _ in range(60):
        spans, begin = [], 0
        for length in lens:
            new = rng.choice((1, 1, rng.randint(1, 3 * ratio)))
            ends = [n for n in range(1, new + 1) if (length + n) % ratio == 0]
            spans.append(Span(begin, length, new, rng.choice((0, *ends))))
            begin += new
        current, previous = kept.step(spans)
        wanted = [
            (request, group)
            for request, s in enumerate(spans)
            for group in range(s.prefix // ratio, (s.prefix + s.new) // ratio)
        ]
        assert current == [[(i, g * ratio + n) for n in range(ratio)] for i, g in wanted]
        assert previous == [
            [(i, (g - 1) * ratio + n) for n in range(ratio)] if g else [] for i, g in wanted
        ]
        lens = [s.prefix + s.new for s in spans]


def test_a_step_that_finishes_no_group_has_an_empty_plan() -> None:
    plan = GroupPlan.of([Span(0, 5, 2, 0)], 4, "cpu")
    assert plan.current.shape == (0, 4) and not len(plan.ended)
    assert torch.equal(plan.kept_places, torch.tensor([1, 2]))

"""Agreement of DP groups on the steps that they run together.

Sparse layers need the tokens of all groups. All ranks join a *round* before a launch: one MIN over
the world that tells each group's numbers. If any group has work, all run the step and join the next
round; groups without work run an empty step. If none has work, the groups wait for messages until
one of them calls for the next round. Rounds are numbered, so a group can ignore a late call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.model_executor.grouped_runner import GroupPlan

_ABSENT: Final = torch.iinfo(torch.int64).max
"""Placeholder in the rows of other groups, where MIN takes their values."""
_NOTHING: Final = GroupPlan(0, 0, 0, True, 0)


class _Said(NamedTuple):
    """A group's numbers in a round."""

    number: int
    tokens: int
    rows: int
    requests: int
    runs_eagerly: int
    drafts: int
    refuses_drafts: int
    has_stopped: int


class StepAgreement:
    """The rounds of this rank's DP group. Scheduler thread only.

    Args:
        world: All ranks of the server.
        dp_rank: Number of this rank's group.
        dp_size: Number of groups.
        call: Sends the number of a round to the first ranks of the other groups; on the first rank
            of a group. Other ranks pass None.

    Attributes:
        is_called: True if this group has to join the next round, work or not.
        may_draft: True if no group has refused drafts in the last round. Groups that decode verify
            drafts in the same steps, because captured steps have equally many tokens in all groups.
        all_have_stopped: True once every group has said that it ends.
    """

    def __init__(
        self,
        world: RankGroup,
        dp_rank: int,
        dp_size: int,
        call: Callable[[int], object] | None,
    ) -> None:
        self._world, self._dp_rank, self._dp_size, self._call = world, dp_rank, dp_size, call
        self._next = 0
        """Number of the next round."""
        self.is_called = False
        self.may_draft = True
        self.all_have_stopped = False

    def on_call(self, number: int) -> None:
        """Another group calls for a round. A call for an earlier one is late."""
        self.is_called = self.is_called or number >= self._next

    def join(
        self,
        plan: GroupPlan | None,
        *,
        refuses_drafts: bool = False,
        has_stopped: bool = False,
    ) -> GroupStep | None:
        """Join the next round. Calls the other groups, if they do not expect it.

        Args:
            plan: This group's work; None: it has none.
            refuses_drafts: True if this group's requests should decode without drafts.
            has_stopped: True if it never has work again.

        Returns:
            The step for all groups to run; None: none has work.

        Raises:
            RanksDiverged: Another group joined another round.
            RankLost: A rank has ended.
        """
        if not self.is_called and self._call is not None:
            self._call(self._next)
        own = plan or _NOTHING
        said = _Said(
            number=self._next,
            tokens=own.tokens,
            rows=own.rows,
            requests=own.requests,
            runs_eagerly=not own.fits_graph,
            drafts=own.drafts,
            refuses_drafts=refuses_drafts,
            has_stopped=has_stopped,
        )
        table = torch.full((self._dp_size, len(said)), _ABSENT, dtype=torch.int64)
        table[self._dp_rank] = torch.tensor(said)
        least = self._world.reduce_min(table.flatten()).view_as(table).tolist()
        groups = [_Said(*row) for row in least]
        numbers = [one.number for one in groups]
        if set(numbers) != {self._next}:
            raise RanksDiverged(f"the DP groups are in rounds {numbers}: they must be in the same")
        self._next += 1
        self.may_draft = not any(one.refuses_drafts for one in groups)
        self.all_have_stopped = all(one.has_stopped for one in groups)
        self.is_called = any(one.tokens for one in groups)
        if not self.is_called:
            return None
        kinds = {one.drafts > 0 for one in groups if one.tokens}
        runs_eagerly = len(kinds) > 1 or any(one.runs_eagerly for one in groups)
        return GroupStep(
            tokens=tuple(one.tokens for one in groups),
            rows=tuple(one.rows for one in groups),
            graph_rows=None if runs_eagerly else max(one.requests for one in groups),
            drafts=tuple(one.drafts for one in groups) if True in kinds else (),
        )

"""The end of a rank beside others: none leaves while another still watches it."""

from __future__ import annotations

from unittest import mock

import pytest

from sglang.srt.distributed.rendezvous import Rendezvous
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.process import run
from sglang.srt.process.run import OtherRanks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("num_groups", "calls"), [(1, ["close", "meet"]), (2, ["meet", "close", "meet"])]
)
def test_groups_that_finish_at_unlike_times_are_watched_until_all_have(
    num_groups: int, calls: list[str]
) -> None:
    found: list[str] = []
    world = mock.Mock(reduce_min=lambda values: found.append("meet"))
    watch = mock.Mock(close=lambda: found.append("close"))
    with (
        mock.patch.object(run, "RankWatch", return_value=watch),
        mock.patch.object(run, "make_store"),
        mock.patch.object(TorchRankGroup, "of_world", return_value=world),
    ):
        others = OtherRanks(Rendezvous(rank=1, size=2, host="127.0.0.1", port=1))
        others.watch()
        others.leave(num_groups)
    assert found == calls


def test_a_rank_alone_meets_nobody() -> None:
    OtherRanks(None).leave(1)

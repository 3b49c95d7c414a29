"""Collectives of a step: an agreement and two exchanges a layer for DP groups that share experts;
none while nobody has work; for others as many as before there were groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.groups.counted_steps import LAYERS, counts_of, save_model
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-b-test-cpu")

NOBODY = "nobody has work"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counted")
    save_model(path)
    return path


@pytest.mark.parametrize("ep_size", [1, 2])
def test_ranks_without_groups_make_two_sums_a_layer(model: Path, ep_size: int) -> None:
    for what, counts in counts_of(model, 2, 1, ep_size).items():
        calls = {name: calls for name, (calls, _) in counts.items() if calls}
        assert calls == ({} if what == NOBODY else {"all_reduce": 2 * LAYERS + 1, "all_gather": 1})


def test_groups_of_one_rank_agree_and_exchange(model: Path) -> None:
    found = counts_of(model, 4, 4, 1)
    for what, counts in found.items():
        calls = {name: calls for name, (calls, _) in counts.items() if calls}
        if what == NOBODY:
            assert calls == {}
        elif what == "all decode 4":
            assert calls == {"min_on_cpu": 1, "all_gather": LAYERS, "reduce_scatter": LAYERS}
        else:
            # Sums avoid padding. The last layer may have none: each group has a few rows there.
            assert calls["min_on_cpu"] == 1
            names = ("all_reduce", "all_gather", "reduce_scatter")
            assert sum(calls.get(name, 0) for name in names) == 2 * LAYERS
            assert calls["all_reduce"] >= 2 * (LAYERS - 1)
    assert found["all decode 4"]["min_on_cpu"][1] == 4 * 8 * 8, "eight numbers of each group"


def test_groups_of_two_ranks_also_sum(model: Path) -> None:
    counts = counts_of(model, 4, 2, 4)["all decode 4"]
    calls = {name: calls for name, (calls, _) in counts.items() if calls}
    assert calls == {
        "min_on_cpu": 1,
        "all_reduce": 2 * LAYERS + 1,
        "all_gather": LAYERS + 1,
        "reduce_scatter": LAYERS,
    }

"""The steps of a load: which layers of a pool come at once, and in which order those of all do."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.host.load_steps import (
    StepsInOrder,
    equal_steps,
    join_steps,
    layer_steps,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("num_layers", "at_once", "starts"),
    [
        (1, 1, [0]),
        (2, 1, [0, 1]),
        (2, 2, [0]),
        (3, 2, [0, 1, 2]),
        (6, 1, [0, 1, 2, 3, 4, 5]),
        (6, 6, [0]),
        (12, 6, [0, 1, 7, 11]),
    ],
)
def test_the_first_layer_and_the_last_one_come_alone(
    num_layers: int, at_once: int, starts: list[int]
) -> None:
    steps = layer_steps(num_layers, at_once)
    assert [step.start for step in steps] == starts
    assert [layer for step in steps for layer in step] == list(range(num_layers))


KV = ({1: 0, 3: 1, 5: 2}, layer_steps(3, 1))
STATES = ({0: 0, 2: 1, 4: 2}, layer_steps(3, 3))


def test_a_layer_waits_for_all_that_was_issued_up_to_it() -> None:
    steps = join_steps([KV, STATES], 0, 7)
    assert steps.issued == (((1, 0),), ((0, 0),), ((0, 1),), ((0, 2),))
    assert steps.step_of == (0, 1, 1, 2, 2, 3, 3)


def test_a_first_layer_that_is_not_loaded_waits_for_an_empty_step() -> None:
    steps = join_steps([KV], 0, 7)
    assert steps.issued == ((), ((0, 0),), ((0, 1),), ((0, 2),))
    assert steps.step_of == (0, 1, 1, 2, 2, 3, 3)
    assert join_steps([KV], 1, 7).issued == steps.issued[1:], "no pool has layer 0"
    assert join_steps([], 0, 2).issued == ((),)


@pytest.mark.parametrize(
    ("num_layers", "count", "steps"),
    [
        (6, 1, [range(6)]),
        (6, 2, [range(3), range(3, 6)]),
        (7, 2, [range(4), range(4, 7)]),
        (1, 2, [range(1)]),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_equal_steps_are_as_long_as_each_other(
    num_layers: int, count: int, steps: list[range]
) -> None:
    assert list(equal_steps(num_layers, count)) == steps


def test_the_layers_of_a_step_are_copied_with_its_first_one() -> None:
    steps = StepsInOrder((range(1), range(1, 3), range(3, 4)))
    assert [steps.of(layer) for layer in range(4)] == [range(1), range(1, 3), None, range(3, 4)]
    assert steps.of(3) is None, "it is there"


def test_a_load_that_starts_elsewhere_is_of_one_layer_or_of_all() -> None:
    steps = StepsInOrder((range(1), range(1, 3)))
    assert steps.of(2) == range(2, 3)
    assert [steps.of(layer) for layer in range(3)] == [range(1), range(1, 3), None]
    assert StepsInOrder((range(3),)).of(2) == range(3)

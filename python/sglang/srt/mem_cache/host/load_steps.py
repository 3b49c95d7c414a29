"""Which layers of a load come together. Pure functions.

A pool's layers come in steps: consecutive layers that are issued at once. The steps of all pools of
a load are joined in the order in which a forward needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def layer_steps(num_layers: int, at_once: int) -> tuple[range, ...]:
    """The steps of a pool's layers, at most `at_once` each. The first layer comes alone, because a
    forward waits for it; so does the last one: when it is there, little is left to be computed."""
    if at_once >= num_layers:
        return (range(num_layers),)
    starts = sorted({0, *range(1, num_layers, at_once), num_layers - 1})
    return tuple(map(range, starts, [*starts[1:], num_layers]))


@functools.cache
def equal_steps(num_layers: int, count: int) -> tuple[range, ...]:
    """At most `count` steps of a pool's layers, as long as each other."""
    at_once = -(-num_layers // count)
    starts = range(0, num_layers, at_once)
    return tuple(range(start, min(start + at_once, num_layers)) for start in starts)


class StepsInOrder:
    """The steps of one pool's load while their layers are issued."""

    def __init__(self, steps: Sequence[range]) -> None:
        self._steps = {step.start: step for step in steps}
        self._issued_until = 0

    def of(self, layer: int) -> range | None:
        """The layers to copy when `layer` is issued; None: it was copied with an earlier one.

        A load goes from layer 0 on; one that starts elsewhere is of that layer alone, unless all
        come at once.
        """
        if layer < self._issued_until:
            return None
        if layer != self._issued_until and len(self._steps) > 1:
            return range(layer, layer + 1)
        step = self._steps[self._issued_until]
        self._issued_until = step.stop
        return step


@dataclass(frozen=True, slots=True)
class LoadSteps:
    """The steps of a load of several pools."""

    issued: tuple[tuple[tuple[int, int], ...], ...]
    """For each step what it issues: the pool's place in the load, and its own layer that begins a
    step of that pool."""
    step_of: tuple[int, ...]
    """For each model layer the step after which a forward may read it."""
    of_pools: tuple[Sequence[range], ...]
    """For each pool its own steps."""


def join_steps(
    pools: Sequence[tuple[Mapping[int, int], Sequence[range]]], first_layer: int, num_layers: int
) -> LoadSteps:
    """Join the steps of several pools.

    Args:
        pools: For each pool of a load its own layer by model layer, and its steps.
        first_layer: The first model layer that any pool of the model has. If the load does not
            bring it, its readers wait for an empty step, and so for earlier loads alone.
        num_layers: Layers of the model.
    """
    starts = [{step.start for step in steps} for _, steps in pools]
    is_loaded = any(first_layer in own for own, _ in pools)
    issued: list[tuple[tuple[int, int], ...]] = [] if is_loaded else [()]
    step_of = []
    for layer in range(num_layers):
        begun = tuple(
            (place, own[layer])
            for place, (own, _) in enumerate(pools)
            if layer in own and own[layer] in starts[place]
        )
        if begun:
            issued.append(begun)
        step_of.append(max(0, len(issued) - 1))
    return LoadSteps(tuple(issued), tuple(step_of), tuple(steps for _, steps in pools))

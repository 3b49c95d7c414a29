"""A `StateRig` whose model keeps two kinds of state of a prefix, in the same slots.

The kind that hands the slots out is a *tally*: two numbers in some layers, a class and a pool of no
kind's own. The states of linear attention share its slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from rigs.caches.cache_rig import RIG_DEVICE, RigRequest
from rigs.caches.state_rig import NUM_LAYERS, SPEC, StateRequest, StateRig, state_value
from rigs.caches.stepped_rig import SteppedStateRig
from sglang.srt.mem_cache.device.pool_registry import ModelPools, make_pools
from sglang.srt.mem_cache.device.state_pool import MambaPool, StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)

TALLY: Final = StateSpec(
    name=PoolName.INDEXER,
    layers=(0, 2, 3),
    buffers=(StateBuffer("tally", (2,), torch.int32),),
    item=ItemKind.STATE,
    hit_policy=PoolHitPolicy.TRAILING_PAGES,
)


class TwoStatesRig(StateRig):
    """Fills both states, and checks both where a request continues."""

    def model_pools(self) -> ModelPools | None:
        shared = replace(self.spec, indices_from_pool=TALLY.name)
        pools = make_pools((TALLY, shared), 1, 1, RIG_DEVICE, num_states=self.num_states)
        tally, mamba = pools[TALLY.name], pools[SPEC.name]
        assert isinstance(tally, StatePool) and isinstance(mamba, MambaPool)
        self.slots, self.mamba = tally, mamba
        return ModelPools.of([self.pool, tally, mamba], NUM_LAYERS)

    def _wait_for_load(self) -> None:
        super()._wait_for_load()
        for layer in TALLY.layers:
            self.slots.wait_for_layer(layer)

    def fill(self, slot: torch.Tensor, request: RigRequest, length: int, ahead: int = 0) -> None:
        super().fill(slot, request, length, ahead)
        value = int(state_value(request, length)) + ahead
        (tally,) = self.slots.buffers
        for place in range(len(TALLY.layers)):
            tally[place, slot] = tally.new_tensor([value + place, -value])

    def _check_state(self, request: StateRequest, length: int) -> None:
        super()._check_state(request, length)
        assert request.mamba_pool_idx is not None
        value = int(state_value(request, length)) if length else 0
        (tally,) = self.slots.buffers
        for place in range(len(TALLY.layers)):
            found = tally[place, request.mamba_pool_idx].tolist()
            wanted = [[value + place, -value]] if length else [[0, 0]]
            assert found == wanted, f"{request.rid}: the tally behind {length} tokens"


class SteppedTwoStatesRig(SteppedStateRig, TwoStatesRig):
    """A `TwoStatesRig` whose copies and transfers happen when a test says so."""

"""A `StateRig` whose model compresses groups of tokens.

It keeps what a model with compressed rows keeps: rows and indexer keys of short groups, rows of
long groups in other layers, a ring and the overlap of the group before as states of a prefix, and
the open group of each running request. No pool has an item for a single token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from rigs.caches.cache_rig import RIG_DEVICE, RigRequest
from rigs.caches.state_rig import NUM_LAYERS, SPEC, StateRequest, StateRig, state_value
from rigs.caches.stepped_rig import SteppedStateRig
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools, kv_pool, make_pools
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_pool import MambaPool, StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)

RING: Final = StateSpec(
    name=PoolName.SWA,
    layers=(0, 1, 2, 3),
    buffers=(StateBuffer("ring", (3, 2), torch.float32),),
    item=ItemKind.STATE,
    hit_policy=PoolHitPolicy.TRAILING_PAGES,
)
OVERLAP: Final = replace(SPEC, name=PoolName.COMPRESSOR, indices_from_pool=PoolName.SWA)
OPEN_GROUP: Final = StateSpec(
    name=PoolName.OPEN_GROUP,
    layers=(1, 2, 3),
    buffers=(StateBuffer("values", (2, 2), torch.float32), StateBuffer("gates", (2,), torch.int32)),
    item=ItemKind.REQUEST,
)


def grouped_specs(short: int, long: int, width: int = 4) -> tuple[StateSpec, ...]:
    """Specs of a model of four layers, for groups of `short` and of `long` tokens."""
    return (
        RowSpec.of((1, 3), width, torch.float32, stride=short),
        IndexerSpec.of((1, 3), 2, torch.bfloat16, stride=short),
        RowSpec.of(
            (2,),
            width,
            torch.float32,
            stride=long,
            name=PoolName.C128,
            indices_from_pool=PoolName.KV,
        ),
        RING,
        OVERLAP,
        OPEN_GROUP,
    )


@dataclass
class GroupedRig(StateRig):
    """Fills all pools, and checks all that it reuses. A page has two short groups, and a long one.

    Attributes:
        short, long: Tokens of a group.
    """

    def __post_init__(self) -> None:
        self.spec = OVERLAP
        self.short, self.long = max(1, self.page_size // 2), self.page_size
        super().__post_init__()
        self.rows.request_pools = [self.open]

    def make_pool(self, size: int) -> KVCache:
        self.made = make_pools(
            grouped_specs(self.short, self.long),
            size,
            self.page_size,
            RIG_DEVICE,
            num_states=self.num_states,
            num_requests=32,
        )
        return kv_pool(self.made)

    def model_pools(self) -> ModelPools | None:
        ring, overlap = self.made[PoolName.SWA], self.made[PoolName.COMPRESSOR]
        keys, far = self.made[PoolName.INDEXER], self.made[PoolName.C128]
        own = self.made[PoolName.OPEN_GROUP]
        assert isinstance(ring, StatePool) and isinstance(overlap, MambaPool)
        assert isinstance(keys, NSAIndexerPool) and isinstance(far, RowPool)
        assert isinstance(self.pool, RowPool) and isinstance(own, RequestPool)
        self.slots, self.mamba = ring, overlap
        self.near, self.keys, self.far, self.open = self.pool, keys, far, own
        return ModelPools.of(self.made.values(), NUM_LAYERS)

    def spoil(self) -> None:
        """Overwrite all that is cached on the device."""
        for pool in self.made.values():
            for part in pool.parts:
                for layer in part:
                    layer.fill_(77)

    # ---- groups -----------------------------------------------------------------------------

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        for layer in (1, 3):
            items, ends, old = self._groups(row, known, self.short)
            self._use_rows(self.near, layer, items, wanted[ends], old)
            keys = (wanted[ends] - layer)[:, None].expand(-1, 2)
            reused = self.keys.get_index_k_buffer(layer)[items[:old]]
            assert torch.equal(reused.to(torch.float64), keys[:old]), layer
            self.keys.set_index_k_buffer(layer, items[old:], keys[old:])
        items, ends, old = self._groups(row, known, self.long)
        self._use_rows(self.far, 2, items, wanted[ends], old)

    def _groups(
        self, row: torch.Tensor, known: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Items of the whole groups of a request, their last positions, and how many are cached."""
        ends = torch.arange(size - 1, len(row), size, device=row.device)
        assert torch.equal(row[ends] // size, row[ends - size + 1] // size), "one item a group"
        return row[ends] // size, ends, known // size

    def _use_rows(
        self, pool: RowPool, layer: int, items: torch.Tensor, values: torch.Tensor, old: int
    ) -> None:
        scale = torch.arange(1, 5, device=RIG_DEVICE)
        rows = ((values + layer)[:, None] * scale).to(torch.float32)
        assert torch.equal(pool.get_key_buffer(layer)[items[:old]], rows[:old]), (layer, old)
        pool.set_kv_buffer(layer, items[old:], rows[old:], rows[old:])

    def _compute(self, request: RigRequest) -> None:
        has_row = request.req_pool_idx is not None
        super()._compute(request)
        assert request.req_pool_idx is not None
        for buffer in self.open.buffers:
            begun = buffer[:, request.req_pool_idx]
            assert has_row or not begun.any(), f"{request.rid} begins with an open group"
            begun.fill_(len(request.kv_committed_ids))

    # ---- states of prefixes -----------------------------------------------------------------

    def _wait_for_load(self) -> None:
        for pool in (self.slots, self.mamba):
            for layer in pool.spec.layers:
                pool.wait_for_layer(layer)

    def fill(self, slot: torch.Tensor, request: RigRequest, length: int, ahead: int = 0) -> None:
        super().fill(slot, request, length, ahead)
        value = state_value(request, length) + ahead
        (ring,) = self.slots.buffers
        for layer in RING.layers:
            ring[layer, slot] = value * 8 + layer

    def _check_state(self, request: StateRequest, length: int) -> None:
        super()._check_state(request, length)
        assert request.mamba_pool_idx is not None
        (ring,) = self.slots.buffers
        for layer in RING.layers:
            wanted = state_value(request, length) * 8 + layer if length else 0
            found = ring[layer, request.mamba_pool_idx]
            assert (found == wanted).all(), f"{request.rid}: the ring behind {length} tokens"


class SteppedGroupedRig(SteppedStateRig, GroupedRig):
    """A `GroupedRig` whose copies and transfers happen when a test says so."""

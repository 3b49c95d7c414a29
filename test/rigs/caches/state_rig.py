"""A prefix cache of a made-up model with recurrent states, for tests of the tiers without a model.

A state is a number that depends on all tokens before it, so that a wrong, stale or misplaced state
is detected. `StateRig.run` takes the steps of the scheduler: match, load, copy the state to the
request's own slot, compute with snapshots at aligned positions, insert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from rigs.caches.cache_rig import RIG_DEVICE, CacheRig, Reused, RigRequest, expected_kv
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec, StatePool
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.state_component import StateComponent
from sglang.srt.mem_cache.tree.tree_node import TreeNode

SPEC = MambaSpec.of_shapes(
    (1, 3), (1, 2, 2), (3, 2), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
)
NUM_LAYERS = 4
"""Layers of the model: keys and values in the first three, states in the second and the fourth."""


@dataclass(eq=False)
class StateRequest(RigRequest):
    """A `StatefulRequest`."""

    mamba_pool_idx: torch.Tensor | None = None
    mamba_track_slot: torch.Tensor | None = None
    mamba_last_track_seqlen: int | None = None

    def states(self) -> list[torch.Tensor]:
        """The state slots that it owns, int64 each."""
        slots = (self.mamba_pool_idx, self.mamba_track_slot)
        return [slot.cpu() for slot in slots if slot is not None]


@dataclass
class StateRig(CacheRig):
    """The tiers of one engine whose model keeps recurrent states too."""

    num_states: int = 12
    alignment: int = 0
    """Tokens between positions for snapshots; 0: a page."""
    spec: MambaSpec = SPEC

    def __post_init__(self) -> None:
        self.alignment = self.alignment or self.page_size
        self.mamba = MambaPool(self.spec, self.num_states, RIG_DEVICE)
        self.slots: StatePool = self.mamba
        """The pool that hands out the slots."""
        super().__post_init__()

    def model_pools(self) -> ModelPools | None:
        return ModelPools.of([self.pool, self.mamba], NUM_LAYERS)

    def snapshot_alignment(self) -> int | None:
        return self.alignment

    @property
    def states(self) -> StateComponent:
        """The tree's component for states."""
        (states,) = self.tree.tree.components
        assert isinstance(states, StateComponent)
        return states

    # ---- one request ------------------------------------------------------------------------

    def match(self, ids: Sequence[int], extra_key: str | None = None) -> MatchResult:
        return self.tree.match_prefix(MatchPrefixParams(RadixKey(list(ids), extra_key)))

    def arrive(
        self, rid: str, ids: list[int], extra_key: str | None = None, *, only_join: bool = False
    ) -> None:
        match = self.match(ids, extra_key)
        found = len(match.device_indices) + match.host_hit_length
        self.tree.note_waiting(rid, self._arrivals, match.last_host_node)
        self._arrivals += 1
        rest, node = ids[found:], match.last_host_node
        self.tree.prefetch_from_storage(rid, node, rest, extra_key=extra_key, only_join=only_join)

    def admit(
        self, rid: str, ids: list[int], extra_key: str | None = None
    ) -> tuple[RigRequest, Reused]:
        """Load the prefix from the tiers, and compute the rest: a part for each snapshot."""
        request = StateRequest(rid, extra_key, ids, torch.empty(0), self.tree.root_node)
        request.mamba_pool_idx = on_device(self.state_slot().tolist(), RIG_DEVICE, torch.int64)
        reused, branching = self._reuse(request)
        ends = {len(ids) // self.alignment * self.alignment, branching or 0}
        known = reused.total
        for end in sorted({*ends, len(ids)}):
            if end > known:
                self.compute(request, ids[:end], snapshot=end if end in ends else None)
                known = end
                if known < len(ids):
                    self.tree.cache_unfinished_req(request)
        return request, reused

    def _reuse(self, request: StateRequest) -> tuple[Reused, int | None]:
        """Copy the state of the longest cached prefix to the request's slot, and lock its pages."""
        tree, ids = self.tree, request.kv_committed_ids
        key = RadixKey(ids, request.extra_key)
        match = tree.match_prefix(MatchPrefixParams(key, cow_mamba=True, req=request))
        prefix, node = match.device_indices, match.last_device_node
        tree.inc_lock_ref(node)
        total = len(prefix)
        if match.host_hit_length or match.mamba_host_hit_length:
            params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            loaded, lower = tree.init_load_back(params)
            tree.inc_lock_ref(lower)
            tree.dec_lock_ref(node)
            node, total = lower, depth(lower)
            prefix = torch.cat([prefix, loaded])[:total]
        tree.note_scheduled(request.rid)
        self.await_loads()
        running = request.mamba_pool_idx
        assert running is not None
        if not total:
            self.slots.zero(running)
        elif node is not match.last_device_node or match.mamba_host_hit_length:
            self._wait_for_load()
            self.states.copy_to(node, running)
        request.last_node, request.prefix_indices = node, prefix
        request.cache_protected_len = total
        self._check_state(request, total)
        device = min(len(match.device_indices), total)
        storage = min(tree.pop_prefetch_loaded_tokens(request.rid), total - device)
        return Reused(device, total - device - storage, storage), match.mamba_branching_seqlen

    def _wait_for_load(self) -> None:
        for layer in self.spec.layers:
            self.mamba.wait_for_layer(layer)

    def compute(
        self, request: StateRequest, ids: Sequence[int], *, snapshot: int | None = None
    ) -> None:
        """Compute up to the end of `ids`, with a snapshot after the first `snapshot` tokens."""
        request.kv_committed_ids = list(ids)
        self._compute(request)
        if snapshot is not None:
            if request.mamba_track_slot is None:
                request.mamba_track_slot = self.state_slot()
            self.fill(request.mamba_track_slot, request, snapshot)
            request.mamba_last_track_seqlen = snapshot
        assert request.mamba_pool_idx is not None
        # Steps overlap: the running state is one token further than what is known to be computed.
        self.fill(request.mamba_pool_idx, request, len(ids), ahead=1)

    def state_slot(self) -> torch.Tensor:
        """A free slot, int64 `[1]` on the CPU."""
        self.until(self._has_free_state)
        slots = self.slots.take(1)
        assert slots is not None
        return torch.tensor(slots)

    def _has_free_state(self) -> bool:
        if not self.slots.available_size():
            self.tree.evict(EvictParams(mamba_num=1))
        return self.slots.available_size() > 0

    def fill(self, slot: torch.Tensor, request: RigRequest, length: int, ahead: int = 0) -> None:
        """Write the state after the first `length` tokens of a request, or a later one."""
        value = state_value(request, length) + ahead
        for layer in range(len(self.spec.layers)):
            temporal, conv = self.state_rows(value, layer)
            self.mamba.temporal[layer, slot] = temporal
            self.mamba.conv[layer, slot] = conv.to(self.mamba.conv.dtype)

    def state_rows(self, value: float, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`temporal` and `conv` of a state made of `value` in a layer: elements that all differ."""
        temporal, conv = (distinct_numbers(buffer.shape) for buffer in self.spec.buffers)
        return (value + layer + 1) * temporal, (value - layer + 2) * conv

    def _check_state(self, request: StateRequest, length: int) -> None:
        assert request.mamba_pool_idx is not None
        value = state_value(request, length) if length else None
        nothing = torch.zeros(()), torch.zeros(())
        for layer in range(len(self.spec.layers)):
            temporal = self.mamba.temporal[layer, request.mamba_pool_idx]
            conv = self.mamba.conv[layer, request.mamba_pool_idx].float()
            wanted = nothing if value is None else self.state_rows(value, layer)
            assert (temporal == wanted[0]).all(), f"{request.rid}: the state behind {length} tokens"
            assert (conv == wanted[1]).all(), f"{request.rid}: the state behind {length} tokens"

    def finish(self, request: RigRequest, *, is_insert: bool = True) -> None:
        super().finish(request, is_insert=is_insert)
        assert isinstance(request, StateRequest) and request.mamba_pool_idx is not None
        self.slots.free(request.mamba_pool_idx)
        request.mamba_pool_idx = None

    def flush(self) -> None:
        super().flush()
        self.slots.clear()

    def check(self, running: Sequence[RigRequest] = ()) -> None:
        """Assert that every slot has one owner: the tree, a free list or one of `running`."""
        table = self.rows.req_to_token
        self.tree.check_integrity(
            [
                table[one.req_pool_idx, one.cache_protected_len : one.kv_committed_len].long()
                for one in running
            ],
            [slot for one in running if isinstance(one, StateRequest) for slot in one.states()],
        )


def state_value(request: RigRequest, length: int) -> float:
    """The number that the state after the first `length` tokens of a request is made of."""
    return float(expected_kv(request.kv_committed_ids[:length], request.extra_key)[-1])


def distinct_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Powers of two on the rig's device: a number of few bits times each is exact in bfloat16."""
    return 2.0 ** torch.arange(prod(shape), device=RIG_DEVICE).view(shape)


def depth(node: TreeNode) -> int:
    """Tokens up to the end of `node`."""
    tokens = 0
    while node.parent is not None:
        tokens += len(node.key)
        node = node.parent
    return tokens

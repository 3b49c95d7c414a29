"""The device pools of a checkable model, and how facts are stored in them.

An item of a buffer is several copies of one fact (`checkable_model.py`), one for each head and
part. Each is changed by a mark of its own, so that bytes in a wrong layer, buffer or head show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from rigs.schedulers.checkable_model import Words
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.hidden_rows import HiddenRows, hidden_spec
from sglang.srt.mem_cache.device.memory_pool import (
    HybridReqToTokenPool,
    KVCache,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.nsa_pool import NSASpec, NSATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec, StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    KVSpec,
    PoolName,
    RankShare,
    RankSplit,
    StateBuffer,
    StateSpec,
)

_ALL_HEADS: Final = RankShare(RankSplit.HEADS, 0, 1, 1)
_MOST_HEADS: Final = 16
_NAMES: Final = {
    "k": "keys",
    "v": "values",
    "latent": "latent rows",
    "index_k": "indexer keys",
    "temporal": "recurrent states",
    "conv": "convolution states",
    "hidden": "hidden states",
    "rows": "rows of groups",
    "group": "open groups",
}
"""Names of spec buffers in error messages."""
_MARKS: Final = dict(
    zip(
        _NAMES,
        np.random.default_rng(0).integers(
            0, 1 << 63, (len(_NAMES), 7, 3, _MOST_HEADS, 2), dtype=np.uint64
        ),
        strict=True,
    )
)
"""For each buffer `[layer, part, head, word]`."""
HIDDEN_SIZE: Final = 8
"""fp32 numbers of a hidden state, which hold two copies of a fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckableState:
    """State of a prefix on one rank of a checkable model. The defaults are a dense model."""

    is_sparse: bool = False
    """True: latent rows with an indexer's keys replace the keys and values of each head."""
    num_states: int = 0
    """Slots of recurrent states; 0: the model keeps none."""
    alignment: int = 1
    """Positions of snapshots are multiples of this many tokens."""
    heads: RankShare = _ALL_HEADS
    """The heads of this rank."""
    drafts: bool = False
    """True if it has a draft layer behind the others, which has state for each token."""
    group: int = 0
    """Tokens of a group, which has a row in a pool of its own once it is whole; a request has the
    fact of its open group. 0: there are no groups. Needs states, and no drafts."""
    is_repeatable: bool = False
    """True if states are windows: see `StateSpec.is_repeatable`. Without drafts alone."""

    @property
    def token_layers(self) -> tuple[int, ...]:
        """Layers with state for each token, the draft layer last."""
        layers = (1, 4) if self.num_states else (0, 1, 2)
        return (*layers, self.draft_layer) if self.drafts else layers

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers with a recurrent state."""
        return (0, 2, 3) if self.num_states else ()

    @property
    def num_layers(self) -> int:
        """Layers of the model, the draft layer included; where there are states the last one before
        it keeps nothing."""
        return self.draft_layer + self.drafts

    @property
    def draft_layer(self) -> int:
        """The draft layer, if there is one."""
        return 6 if self.num_states else 3


@dataclass(frozen=True, slots=True)
class FactBuffer:
    """One buffer of a pool."""

    name: str
    pool: BaseDevicePool
    layers: Sequence[torch.Tensor]
    """For each of the pool's layers `[slots, *item]`."""
    marks: Words
    """`[model layer, copies of the fact, 2]`."""

    def read(self, layer: int) -> Words:
        """`[slots, copies, 2]`, a view with the marks: a model layer. Waits for its load."""
        raw = self.layers[self.pool.wait_for_layer(layer)].view(torch.uint8).numpy()
        return raw.reshape(len(raw), -1).view(np.uint64).reshape(len(raw), -1, 2)


MakeStates = Callable[[MambaSpec, int], MambaPool]
"""Makes the pool of some states; arguments: spec, slots."""
MakeRequests = Callable[[StateSpec, int], RequestPool]
"""Makes the pool of states of running requests; arguments: spec, rows."""


def on_cpu(spec: StateSpec, size: int) -> RequestPool:
    """A pool of states of `size` running requests."""
    return RequestPool(spec, size, "cpu")


@dataclass(slots=True)
class CheckablePools:
    """The pools of a checkable model.

    Args:
        state: State that the model keeps.
        page_size: Tokens of a page.
        pool_tokens: Slots of L1, in whole pages.
        make_states: Makes the pool of the states.
        make_requests: Makes the pool of open groups.
    """

    state: CheckableState
    page_size: int
    pool_tokens: int
    make_states: MakeStates
    make_requests: MakeRequests = on_cpu
    kv: KVCache = field(init=False)
    states: MambaPool | None = field(init=False, default=None)
    tokens: list[FactBuffer] = field(init=False)
    """Buffers of tokens."""
    prefixes: list[FactBuffer] = field(init=False, default_factory=list)
    """Buffers of recurrent states."""
    hidden: StatePool | None = field(init=False, default=None)
    """Hidden states beside the recurrent ones, for the draft layer."""
    groups: list[FactBuffer] = field(init=False, default_factory=list)
    """Buffers of whole groups."""
    open: list[FactBuffer] = field(init=False, default_factory=list)
    """Buffers of open groups, by rows of requests; made with the rows."""

    def __post_init__(self) -> None:
        state, heads = self.state, self.state.heads
        self.kv = self._token_pool()
        paged = [
            pool
            for pool in (self.kv, *self.kv.auxiliary_pools)
            if isinstance(pool, PagedDevicePool)
        ]
        self.tokens = [
            one
            for pool in paged
            for one in _buffers(pool, pool.parts, heads if not state.is_sparse else RankShare())
        ]
        if state.group:
            spec_of_rows = RowSpec.of(
                state.token_layers,
                8,
                torch.float32,
                stride=state.group,
                name=PoolName.C128,
                indices_from_pool=PoolName.KV,
            )
            rows = RowPool.from_spec(spec_of_rows, self.pool_tokens, self.page_size, "cpu")
            self.groups = _buffers(rows, rows.parts, RankShare())
        if state.num_states:
            count = heads.end - heads.begin
            spec = MambaSpec.of_shapes(
                state.state_layers,
                (count, 2, 2),
                (6 * count, 4),
                ssm_dtype=torch.float32,
                conv_dtype=torch.bfloat16,
                share=heads,
            )
            spec = replace(spec, is_repeatable=state.is_repeatable)
            self.states = self.make_states(spec, state.num_states)
            self.prefixes = _buffers(self.states, [list(one) for one in self.states.buffers], heads)
            if state.drafts:
                of_hidden = hidden_spec(state.draft_layer, HIDDEN_SIZE, torch.float32)
                self.hidden = StatePool(of_hidden, state.num_states, "cpu")
                self.states.share_slots_with(self.hidden)

    def _token_pool(self) -> KVCache:
        state, layers = self.state, self.state.token_layers
        if state.is_sparse:
            rows = MLASpec.of(layers, 4, 4, torch.float32)
            sparse = NSASpec.beside(rows, 8, torch.bfloat16)
            return NSATokenToKVPool.from_spec(sparse, self.pool_tokens, self.page_size, "cpu")
        heads = state.heads
        num = heads.end - heads.begin
        kv = KVSpec.of_heads(tuple(layers), num, 4, torch.float32, share=heads)
        return MHATokenToKVPool.from_spec(kv, self.pool_tokens, self.page_size, "cpu")

    def model_pools(self) -> ModelPools:
        """All pools, the primary pool first."""
        states = [pool for pool in (self.states, self.hidden) if pool is not None]
        groups = [one.pool for one in self.groups]
        paged = [self.kv, *self.kv.auxiliary_pools, *groups]
        return ModelPools.of([*paged, *states], self.state.num_layers)

    @property
    def hidden_marks(self) -> Words:
        """`[copies, 2]`: the marks of a hidden state."""
        return np.ascontiguousarray(_MARKS["hidden"][self.state.draft_layer, : HIDDEN_SIZE // 4, 0])

    def rows(self, max_requests: int, context_len: int) -> ReqToTokenPool:
        """The rows of requests, each with a state if the model keeps some, else with a hidden state
        if it drafts."""
        if self.states is None:
            rows = ReqToTokenPool(max_requests, context_len, "cpu")
            if self.state.drafts:
                rows.last_hidden = HiddenRows(max_requests, HIDDEN_SIZE, torch.float32, "cpu")
            return rows
        hybrid = HybridReqToTokenPool(max_requests, context_len, "cpu", self.states)
        if self.state.group:
            spec = StateSpec(
                name=PoolName.OPEN_GROUP,
                layers=self.state.state_layers,
                buffers=(StateBuffer("group", (8,), torch.float32),),
                item=ItemKind.REQUEST,
            )
            pool = self.make_requests(spec, max_requests)
            self.open = _buffers(pool, pool.parts, RankShare())
            hybrid.request_pools = [pool]
        return hybrid


def _buffers(
    pool: BaseDevicePool, layers: Sequence[Sequence[torch.Tensor]], heads: RankShare
) -> list[FactBuffer]:
    """The buffers of `pool`, whose heads are `heads`. Copies of a fact in an item: those of all
    heads for each part."""
    found = []
    for buffer, of_layers in zip(pool.spec.buffers, layers, strict=True):
        parts = buffer.num_bytes // 16 // (heads.end - heads.begin)
        marks = _MARKS[buffer.name][:, :parts, heads.begin : heads.end]
        found.append(
            FactBuffer(
                _NAMES[buffer.name],
                pool,
                of_layers,
                np.ascontiguousarray(marks).reshape(len(marks), -1, 2),
            )
        )
    return found

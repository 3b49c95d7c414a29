"""States of whole prefixes: one slot holds the state of some layers of a model after all tokens so
far.

A slot is the running state of a request, or a snapshot, which is no longer written. If a model has
several kinds of such state, one pool hands out the slots, and the others share them. A `MambaPool`
has the recurrent states of linear attention, which the delta-net layers of a model keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from sglang.srt.constants import MIB
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    RankShare,
    StateBuffer,
    StateSpec,
)

COPY_BYTES = 256 * MIB
"""Limit of the temporary memory of `StatePool.copy_from`, in bytes."""


class StatePool(BaseDevicePool):
    """Slots of states. The scheduler's thread owns the list of free slots.

    Slot 0 is padding, which has no owner; slots 1 to `size` are handed out. All writes to a slot
    are queued on the current stream, so a slot may be freed while the step that used it last is in
    flight.

    Attributes:
        buffers: For each buffer of the spec a tensor `[layers, size + 1, *shape]`.
    """

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.StatePoolHost"

    def __init__(self, spec: StateSpec, size: int, device: torch.device | str) -> None:
        """
        Args:
            spec: Spec of the state, whose item is a state.
            size: Slots besides padding.

        Raises:
            ValueError: `size` is not positive, or an item of `spec` is not a state.
        """
        if size < 1:
            raise ValueError(f"a pool of recurrent states needs at least 1 slot, not {size}")
        if spec.item is not ItemKind.STATE:
            raise ValueError(f"state '{spec.name}' has an item for each {spec.item}, not a state")
        super().__init__(spec, size, device)
        self.buffers = tuple(
            torch.zeros(
                (self.layer_num, size + 1, *buffer.shape), dtype=buffer.dtype, device=self.device
            )
            for buffer in spec.buffers
        )
        self.parts = tuple(map(list, self.buffers))
        self._sharers: list[StatePool] = []
        """Pools that share the slots and hold further parts of each state."""
        self._is_free: list[bool] = []
        self._free: list[int] = []
        self.clear()

    @classmethod
    def from_spec(
        cls, spec: StateSpec, size: int, page_size: int, device: torch.device | str
    ) -> Self:
        """The pool of `size` states. A page is one state; `page_size` is ignored."""
        return cls(spec, size, device)

    def share_slots_with(self, pool: StatePool) -> None:
        """Let `pool`, which has equally many slots, share the slots of this one: it holds further
        parts of each state, and is copied and zeroed together with this pool."""
        assert pool.size == self.size, f"{pool.spec.name} has other slots"
        self._sharers.append(pool)

    def available_size(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def free_page_ids(self) -> Sequence[torch.Tensor]:
        """int64: all slots without an owner, in no particular order. For the self check."""
        return [torch.tensor(self._free, dtype=torch.int64)]

    def take(self, n: int) -> list[int] | None:
        """Take `n` slots with undefined contents; None if fewer are free."""
        assert self.spec.indices_from_pool is None, f"{self.spec.name} has no slots of its own"
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for slot in taken:
            self._is_free[slot] = False
        return taken

    def alloc(self, n: int) -> torch.Tensor | None:
        """Like `take`, but int64 `[n]` on the device."""
        taken = self.take(n)
        return None if taken is None else on_device(taken, self.device, torch.int64)

    def free(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Take back `slots`: int64 `[n]`, or numbers. Waits for a tensor on a GPU."""
        ids = slots.tolist() if isinstance(slots, torch.Tensor) else slots
        for slot in ids:
            assert 0 < slot <= self.size, f"there is no state slot {slot}"
            assert not self._is_free[slot], f"state slot {slot} freed twice"
            self._is_free[slot] = True
            self._free.append(slot)

    def clear(self) -> None:
        """Take back every slot."""
        self._free = list(range(self.size, 0, -1))  # Popped from the end: low slots first.
        self._is_free = [False] + [True] * self.size

    def copy_from(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy the states of `src` to `dst`, in every layer and in all pools that share slots.

        Args:
            src: int64 `[n]` on the device; a slot may occur several times.
            dst: int64 `[n]` on the device; each slot occurs once, and not in `src`.
        """
        for pool in (self, *self._sharers):
            at_once = max(1, COPY_BYTES // pool.spec.num_bytes)
            for some_src, some_dst in zip(
                torch.split(src, at_once), torch.split(dst, at_once), strict=True
            ):
                for buffer in pool.buffers:
                    buffer.index_copy_(1, some_dst, buffer.index_select(1, some_src))

    def zero(self, slots: torch.Tensor) -> None:
        """Zero the states of `slots` (int64 `[n]` on the device), in all pools that share slots."""
        for pool in (self, *self._sharers):
            for buffer in pool.buffers:
                buffer.index_fill_(1, slots, 0)


def state_pool(pools: Iterable[BaseDevicePool]) -> StatePool | None:
    """The pool of a model's pools that hands out slots of states; None: the model keeps none."""
    found = (
        pool
        for pool in pools
        if isinstance(pool, StatePool) and pool.spec.indices_from_pool is None
    )
    return next(found, None)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateSpec):
    """The state of linear attention: `temporal` and `conv`."""

    name: PoolName = PoolName.MAMBA
    item: ItemKind = ItemKind.STATE
    hit_policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES

    @classmethod
    def of_shapes(
        cls,
        layers: tuple[int, ...],
        temporal: tuple[int, int, int],
        conv: tuple[int, int],
        *,
        ssm_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        share: RankShare | None = None,
        conv_runs: tuple[int, ...] | None = None,
    ) -> MambaSpec:
        """The spec of states of these shapes.

        Args:
            layers: The layers with states.
            temporal: Shape on one rank: heads, then the two dimensions of a head's state, in a
                delta net elements of a key and of a value.
            conv: Shape on one rank: channels, and inputs before the next token that the convolution
                reads.
            share: The model's heads that these are; None: all of them.
            conv_runs: Channels of each run that is split by heads; None: those of a delta net, all
                queries, all keys and all values.
        """
        heads, key_dim, value_dim = temporal
        if conv_runs is None:
            values = heads * value_dim
            keys, rest = divmod(conv[0] - values, 2)
            # Only channels of queries, keys and values of such heads can be split.
            is_known = rest == 0 and keys > 0 and keys % key_dim == 0
            conv_runs = (keys, keys, values) if is_known else ()
        return cls(
            layers=layers,
            buffers=(
                StateBuffer("temporal", temporal, ssm_dtype, (heads,)),
                StateBuffer("conv", conv, conv_dtype, conv_runs),
            ),
            share=share or RankShare(),
        )


class MambaPool(StatePool):
    """Slots of the recurrent states of linear attention."""

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.MambaPoolHost"

    @property
    def temporal(self) -> torch.Tensor:
        """`[layers, size + 1, heads, ...]`: two dimensions of each head's state."""
        return self.buffers[0]

    @property
    def conv(self) -> torch.Tensor:
        """`[layers, size + 1, channels, kernel - 1]`."""
        return self.buffers[1]

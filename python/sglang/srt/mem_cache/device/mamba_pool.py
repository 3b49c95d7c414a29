"""Recurrent states: what the delta-net layers of a model keep of a whole prefix, one slot for each.

A slot is the running state of a request, or a snapshot of one that is no longer written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
"""Most that `MambaPool.copy_from` holds in between."""


@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateSpec):
    """The state of linear attention: `temporal` and `conv`, in the delta-net layers."""

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
    ) -> MambaSpec:
        """The spec of states of these shapes.

        Args:
            layers: The delta-net layers.
            temporal: Value heads, elements of a key, elements of a value: of one rank.
            conv: Channels (all queries, all keys, all values), and the inputs before the next
                token that the convolution reads.
            ssm_dtype: Of `temporal`.
            conv_dtype: Of `conv`.
            share: Which of the model's heads these are; None: all of them.
        """
        heads, key_dim, value_dim = temporal
        values = heads * value_dim
        keys, rest = divmod(conv[0] - values, 2)
        # Channels that are no queries, keys and values of such heads are not known to be split.
        is_known = rest == 0 and keys > 0 and keys % key_dim == 0
        return cls(
            layers=layers,
            buffers=(
                StateBuffer("temporal", temporal, ssm_dtype, (heads,)),
                StateBuffer("conv", conv, conv_dtype, (keys, keys, values) if is_known else ()),
            ),
            share=share or RankShare(),
        )


class MambaPool(BaseDevicePool):
    """Slots of recurrent states. The scheduler's thread owns the list of free ones.

    Slot 0 is padding, which has no owner; slots 1 to `size` are handed out. Whatever writes to a
    slot is queued on the current stream, so that a slot may be freed while the step that used it
    last is in flight.

    Attributes:
        temporal: `[layers, size + 1, heads, key elements, value elements]`.
        conv: `[layers, size + 1, channels, kernel - 1]`.
    """

    host_pool = "sglang.srt.mem_cache.host.mamba_host_pool.MambaPoolHost"

    def __init__(self, spec: MambaSpec, size: int, device: torch.device | str) -> None:
        """
        Args:
            spec: What a slot stores.
            size: Slots besides padding.
            device: Where the buffers are.

        Raises:
            ValueError: `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"a pool of recurrent states needs at least 1 slot, not {size}")
        super().__init__(spec, size, device)
        self.temporal, self.conv = (
            torch.zeros(
                (self.layer_num, size + 1, *buffer.shape), dtype=buffer.dtype, device=self.device
            )
            for buffer in spec.buffers
        )
        self._is_free: list[bool] = []
        self._free: list[int] = []
        self.clear()

    def available_size(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def free_slot_ids(self) -> list[int]:
        """Every slot without an owner, in no particular order. For the self check."""
        return self._free.copy()

    def take(self, n: int) -> list[int] | None:
        """`n` slots, whose contents are anything; None where fewer are free."""
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for slot in taken:
            self._is_free[slot] = False
        return taken

    def alloc(self, n: int) -> torch.Tensor | None:
        """As `take`, on the device: int64 `[n]`."""
        taken = self.take(n)
        return None if taken is None else on_device(taken, self.device, torch.int64)

    def free(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Take back `slots`: int64 `[n]`, or numbers. A tensor on a GPU is waited for."""
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
        """Copy the states of `src` to `dst`, in every layer.

        Args:
            src: int64 `[n]` on the device; a slot may be there several times.
            dst: int64 `[n]` on the device; each slot once, and none that is in `src`.
        """
        at_once = max(1, COPY_BYTES // self.spec.num_bytes)
        for some_src, some_dst in zip(
            torch.split(src, at_once), torch.split(dst, at_once), strict=True
        ):
            for buffer in (self.temporal, self.conv):
                buffer.index_copy_(1, some_dst, buffer.index_select(1, some_src))

    def zero(self, slots: torch.Tensor) -> None:
        """Reset the states of `slots` (int64 `[n]` on the device) to those of no tokens."""
        for buffer in (self.temporal, self.conv):
            buffer.index_fill_(1, slots, 0)

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        buffers = [*self.temporal, *self.conv]
        return (
            [b.data_ptr() for b in buffers],
            [b.nbytes for b in buffers],
            [b[0].nbytes for b in buffers],
        )

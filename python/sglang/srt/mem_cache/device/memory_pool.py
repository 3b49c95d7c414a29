"""Device memory (L1): the rows with the token slots of each request, and the slots themselves.

`ReqToTokenPool` maps (request row, position) to a slot; a `KVCache` holds what a slot stores. The
allocator and the tree decide who owns a slot. The scheduler thread calls everything here; copy
streams read and write the buffers too, in the order that the layer counter keeps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from sglang.srt.mem_cache.device.base_device_pool import (
    LayerOrId,
    PagedDevicePool,
    held_layers,
    refuse_memory_saver,
)
from sglang.srt.mem_cache.device.state_spec import KVSpec, StateSpec

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.hidden_rows import HiddenRows
    from sglang.srt.mem_cache.device.request_pool import RequestPool
    from sglang.srt.mem_cache.device.state_pool import StatePool


class HasReqPoolIdx(Protocol):
    """The part of a request that the row pool uses."""

    req_pool_idx: int | None


class ReqToTokenPool:
    """Rows of slots, one for each running request.

    Attributes:
        req_to_token: int32 `[size + 1, max_context_len]` on `device`. Row r, column p is the slot
            of the token at position p. Columns past a request's length are garbage. The last row
            stays zero, for requests that only pad a batch.
        mamba_pool: Pool in which each request with a row has a recurrent state; None: the model
            keeps none.
        last_hidden: Hidden states for drafts, by row; None: nothing is drafted, or `mamba_pool`'s
            slots have them.
        request_pools: Pools with a slot for each row, which is zeroed when a request gets the row.
    """

    mamba_pool: StatePool | None = None
    request_pools: Sequence[RequestPool] = ()
    last_hidden: HiddenRows | None = None

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: torch.device | str,
        enable_memory_saver: bool = False,
    ) -> None:
        refuse_memory_saver(enable_memory_saver)
        if size < 1 or max_context_len < 1:
            raise ValueError(f"need both >= 1: {size=}, {max_context_len=}")
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        self.req_to_token = torch.zeros(
            (size + 1, max_context_len), dtype=torch.int32, device=self.device
        )
        self._free_rows: list[int] = []
        self.clear()

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a row of `last_hidden`; 0: there is none."""
        return 0 if self.last_hidden is None else self.last_hidden.row_bytes

    def available_size(self) -> int:
        """Rows that no request holds."""
        return len(self._free_rows)

    def alloc(
        self, reqs: Sequence[HasReqPoolIdx], *, zeroes_states: bool = True
    ) -> list[int] | None:
        """Give each request a row (`req_pool_idx`); a request that has a row keeps it.

        Args:
            zeroes_states: False: the first step of each request reads another recurrent state, and
                writes all of its own.

        Returns:
            The rows in the order of `reqs`. If too few are free: None, and nothing has changed.
        """
        without_row = [req for req in reqs if req.req_pool_idx is None]
        if len(without_row) > len(self._free_rows):
            return None
        new_rows = [self._free_rows.pop() for _ in without_row]
        for req, row in zip(without_row, new_rows, strict=True):
            req.req_pool_idx = row
        if new_rows:
            for pool in self.request_pools:
                pool.zero(new_rows)
        return [req.req_pool_idx for req in reqs if req.req_pool_idx is not None]

    def free(self, req: HasReqPoolIdx) -> None:
        """Take back the request's row. The slots in it must have been freed or handed over
        before."""
        row = req.req_pool_idx
        assert row is not None, "the request holds no row"
        assert row not in self._free_rows, f"row {row} freed twice"
        self._free_rows.append(row)
        req.req_pool_idx = None

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """`req_to_token[indices] = values`; `indices` is (row or rows, column or columns)."""
        if not isinstance(indices[1], slice):
            values = values.to(torch.int32)  # An assignment to a slice converts by itself.
        self.req_to_token[indices] = values

    def state_slots(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Slots of the running recurrent states of the requests at `rows`.

        Args:
            rows: int64 `[bs]` on `device`.

        Returns:
            int64 `[bs]` on `device`; None: the model keeps no such states.
        """
        return None

    def state_of(self, row: int) -> int | None:
        """The slot of the running recurrent state of the request at `row`; None: the model keeps
        none."""
        return None

    def running_states(self) -> list[int]:
        """The slot of every request's running recurrent state."""
        return []

    def clear(self) -> None:
        """Take back every row."""
        # Popped from the end: low rows first.
        self._free_rows = list(range(self.size - 1, -1, -1))


class HybridReqToTokenPool(ReqToTokenPool):
    """Gives each request a row and a running state, and takes both back together.

    Attributes:
        mamba_pool: Pool of the states. The tree may own slots of it as well.
    """

    mamba_pool: StatePool

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: torch.device | str,
        mamba_pool: StatePool,
        enable_memory_saver: bool = False,
    ) -> None:
        """See `ReqToTokenPool`."""
        self.mamba_pool = mamba_pool
        self._state_of: list[int] = [0] * size
        """State of each row; 0: the row is free."""
        self._states = torch.zeros(size, dtype=torch.int64, device=device)
        """State of each row, on the device. Entries of free rows are undefined."""
        super().__init__(size, max_context_len, device, enable_memory_saver)

    def available_size(self) -> int:
        """Requests for which a row and a state are free."""
        return min(super().available_size(), self.mamba_pool.available_size())

    def alloc(
        self, reqs: Sequence[HasReqPoolIdx], *, zeroes_states: bool = True
    ) -> list[int] | None:
        """Like `ReqToTokenPool.alloc`; the answer is None also if too few states are free."""
        new = [req for req in reqs if req.req_pool_idx is None]
        if len(new) > self.available_size():
            return None
        rows = super().alloc(reqs)
        assert rows is not None, "there are as many free rows"
        if not new:
            return rows
        states = self.mamba_pool.take(len(new))
        assert states is not None, "there are as many free states"
        new_rows = [req.req_pool_idx for req in new if req.req_pool_idx is not None]
        for row, state in zip(new_rows, states, strict=True):
            self._state_of[row] = state
            # A fill needs no upload, and nearly always there is one request.
            slot = self._states[row : row + 1].fill_(state)
            if zeroes_states:
                self.mamba_pool.zero(slot)
        return rows

    def free(self, req: HasReqPoolIdx) -> None:
        """Take back the request's row and its state."""
        row = req.req_pool_idx
        super().free(req)
        assert row is not None, "checked by the row's pool"
        self.mamba_pool.free([self._state_of[row]])
        self._state_of[row] = 0

    def state_slots(self, rows: torch.Tensor) -> torch.Tensor:
        return self._states.index_select(0, rows)

    def state_of(self, row: int) -> int:
        return self._state_of[row]

    def get_mamba_indices(self, req_indices: torch.Tensor) -> torch.Tensor:
        """Alias of `state_slots` with SGLang's name."""
        return self.state_slots(req_indices)

    def running_states(self) -> list[int]:
        return [state for state in self._state_of if state]

    def clear(self) -> None:
        """Take back every row and every state."""
        super().clear()
        self.mamba_pool.clear()
        self._state_of = [0] * self.size


class KVCache(PagedDevicePool):
    """Token slots of one rank as attention reads them, layer by layer.

    Layer ids are those of the model; the spec has the layers of this pool.
    """

    @classmethod
    def from_spec(
        cls, spec: StateSpec, size: int, page_size: int, device: torch.device | str
    ) -> Self:
        """The pool of `spec`; sizes as in `PagedDevicePool`."""
        pool = cls.__new__(cls)
        pool._set_up(spec, size, page_size, device)
        return pool

    @abstractmethod
    def _set_up(self, spec: Any, size: int, page_size: int, device: torch.device | str) -> None:
        """Make the buffers of `spec`, whose class is this pool's."""

    @abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer. Waits for a load that fills the layer."""

    @abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Values of a layer. Waits for a load that fills the layer."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer. Waits for a load that fills the layer."""

    @abstractmethod
    def kv_buffer_to_write(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, for a kernel that stores new tokens. Does not wait, since a
        load and a forward fill different slots."""

    @abstractmethod
    def set_kv_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Store new tokens. Does not wait, since a load and a forward fill different slots."""

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the key and of the value buffers, the padding page included; latent rows count
        as keys."""
        sizes = [sum(layer.nbytes for layer in part) for part in self.parts]
        return sizes[0], sum(sizes[1:])


class MHATokenToKVPool(KVCache):
    """Keys and values of multi-head or grouped-query attention.

    Attributes:
        k_buffer: For each layer `[size + page_size, head_num, head_dim]` of `store_dtype`.
        v_buffer: For each layer `[size + page_size, head_num, v_head_dim]`.
    """

    host_pool = "sglang.srt.mem_cache.host.pool_kinds.MHATokenToKVPoolHost"

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str,
        enable_memory_saver: bool = False,
        v_head_dim: int | None = None,
        *,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        """SGLang's arguments, for all heads of consecutive layers; `from_spec` takes any spec.

        Args:
            dtype: Dtype of keys and values as attention sees them.
            head_num: KV heads on this rank.
            head_dim: Elements of a key of one head.
            enable_memory_saver: Refused.
            v_head_dim: Elements of a value of one head; as `head_dim` by default.
            start_layer: See `held_layers`; so is `end_layer`.
        """
        refuse_memory_saver(enable_memory_saver)
        held = held_layers(layer_num, start_layer, end_layer)
        spec = KVSpec.of_heads(held, head_num, head_dim, dtype, v_head_dim=v_head_dim)
        self._set_up(spec, size, page_size, device)

    def _set_up(self, spec: KVSpec, size: int, page_size: int, device: torch.device | str) -> None:
        PagedDevicePool.__init__(self, spec, size, page_size, device)
        self.head_num = spec.head_num
        self.head_dim = spec.head_dim
        self.v_head_dim = spec.v_head_dim
        self.k_buffer, self.v_buffer = self.parts

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_dtype(self.k_buffer[self.wait_for_layer(layer_id)])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_dtype(self.v_buffer[self.wait_for_layer(layer_id)])

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.wait_for_layer(layer_id)
        return self._as_dtype(self.k_buffer[index]), self._as_dtype(self.v_buffer[index])

    def kv_buffer_to_write(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.place_to_write(layer_id)
        return self.k_buffer[index].view(self.dtype), self.v_buffer[index].view(self.dtype)

    def set_kv_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Store new tokens.

        Args:
            loc: int64 `[n]`: slots.
            cache_k: `[n, head_num, head_dim]`, any float dtype.
            cache_v: `[n, head_num, v_head_dim]`.
        """
        keys, values = self._as_stored(cache_k), self._as_stored(cache_v)
        index = self.place_to_write(layer)
        self.k_buffer[index].index_copy_(0, loc, keys)
        self.v_buffer[index].index_copy_(0, loc, values)

    def _as_dtype(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.store_dtype is self.dtype else buffer.view(self.dtype)

    def _as_stored(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.dtype)
        return values if self.store_dtype is self.dtype else values.view(self.store_dtype)

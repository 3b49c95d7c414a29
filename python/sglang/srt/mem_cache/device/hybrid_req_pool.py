"""Rows of running requests, each with a recurrent state besides its token slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.device.memory_pool import HasReqPoolIdx, ReqToTokenPool
from sglang.srt.mem_cache.device.state_pool import StatePool


class HybridReqToTokenPool(ReqToTokenPool):
    """Gives each request a row and a running state, zeroed, and takes both back together.

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

    def alloc(self, reqs: Sequence[HasReqPoolIdx]) -> list[int] | None:
        """Like `ReqToTokenPool.alloc`; None also if too few states are free."""
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
        both = on_device([*new_rows, *states], self.device, torch.int64)
        on_rows, slots = torch.split(both, len(new))
        self._states.index_copy_(0, on_rows, slots)
        self.mamba_pool.zero(slots)
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

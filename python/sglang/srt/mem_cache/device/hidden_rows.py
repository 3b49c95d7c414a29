"""The hidden state of each request's last computed token, which the next draft begins with."""

from __future__ import annotations

import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)


def hidden_spec(layer: int, hidden_size: int, dtype: torch.dtype) -> StateSpec:
    """Spec of the hidden state that the draft layer, number `layer`, reads, beside each recurrent
    state."""
    return StateSpec(
        name=PoolName.HIDDEN,
        layers=(layer,),
        buffers=(StateBuffer("hidden", (hidden_size,), dtype),),
        item=ItemKind.STATE,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
        indices_from_pool=PoolName.MAMBA,
    )


class HiddenRows:
    """A table beside `ReqToTokenPool`, for models without recurrent states. Scheduler thread only.

    Attributes:
        table: `[size + 1, hidden_size]` on `device`: row r is that of the request with row r. The
            last row is garbage, for requests that only pad a batch.
        row_bytes: Bytes of a row.
    """

    def __init__(
        self, size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.table = torch.zeros((size + 1, hidden_size), dtype=dtype, device=device)
        self.row_bytes = hidden_size * dtype.itemsize
        self._runtime = device_runtime(device)
        self._stream = self._runtime.make_side_stream()

    def read(self, row: int) -> bytes:
        """The bytes of a row. The step that wrote it must have ended; steps in flight are not
        waited for."""
        with self._stream.use():
            (hidden,) = self._runtime.copy_to_host([self.table[row]]).wait()
        assert hidden is not None
        return hidden.view(torch.uint8).numpy().tobytes()

    def write(self, row: int, raw: bytes) -> None:
        """Write what `read` gave, in order with the current stream."""
        assert len(raw) == self.row_bytes, "the caller has checked the length"
        hidden = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(self.table.dtype)
        self.table[row].copy_(self._runtime.stage_to_device(hidden))

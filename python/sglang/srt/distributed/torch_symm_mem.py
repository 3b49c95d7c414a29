"""Sums of tensors over the GPUs of one machine, which read each other's memory.

A decode step sums some kilobytes twice per layer. A "one shot" kernel, in which every rank reads
and adds all partial sums, takes less time for that than NCCL. If a norm follows, its kernel
computes the sum (`layers/triton_ops/norm.py`). More than two ranks sum the megabytes of a prefill
by "two shots": each adds one share, then reads the shares of the others. Memory, barriers and the
kernels of both are torch's: docs.pytorch.org, "PyTorch Symmetric Memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from sglang.srt.constants import MIB
from sglang.srt.distributed.tensor_group import MOST_PROGRAMS, PeerParts, low_latency_bytes
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime

ALL_REDUCE_BYTES: Final = MIB
"""Most bytes of a tensor for one shot; measured by `python -m benchmark gpu-ranks sums`."""
TWO_SHOT_BYTES: Final = 16 * MIB
"""Most bytes of a tensor for two shots, with more than two ranks; NCCL is as fast for more. Two
ranks' norms read up to `DEFERRED_BYTES`."""
DEFERRED_BYTES: Final = {2: 64 * MIB}
"""Most bytes of a tensor that a norm sums, by number of ranks. Two ranks read no more bytes than
with other algorithms; more ranks read each byte more often than NCCL's rings."""
_DEFERRED_BYTES_OF_MORE: Final = 2 * MIB
_KEYS_BYTES: Final = MIB // 4
"""Most bytes of the keys of a step: 256 requests with 128 keys each."""
_FLAG_BYTES: Final = 4
_ALIGNMENT: Final = 16
"""Bytes that a thread reads at once. Kernels are slow for other sizes."""
_DTYPES: Final = (torch.bfloat16, torch.float32)


class TorchSymmMemCommunicator:
    """This rank's memory for partial sums. Only the thread that runs the model uses it, in captures
    of CUDA graphs too. All ranks make the same calls in the same order.

    The memory has five buffers, and a sixth with more than two ranks. `all_reduce` has the first
    for one shot and the last for two, and returns when no rank reads them any more. Two alternate
    for sums that norms finish. A norm's kernel waits for the partial sums of all ranks, but not
    until they have been read. When a rank begins sum n + 2, all others have begun sum n + 1, so
    they have finished sum n, whose buffer is reused. Therefore the first such sum of a pass must
    come after an `all_reduce` of any size, which is the embedding's. Another two are for keys, and
    alternate likewise. They are followed by the low-latency buffer, to which other ranks write, and
    the flags of barriers between ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Exchange memory with the other ranks; a collective.

        Args:
            device: Device of this rank, with its index.

        Raises:
            RuntimeError: Devices cannot read each other's memory; with torch's message.
        """
        self._name = group.group_name
        size = dist.get_world_size(group)
        self._most = DEFERRED_BYTES.get(size, _DEFERRED_BYTES_OF_MORE)
        keys = ALL_REDUCE_BYTES + 2 * self._most
        low_latency = keys + 2 * _KEYS_BYTES
        flags = low_latency + low_latency_bytes(size)
        self._two_shot = flags + MOST_PROGRAMS * size * _FLAG_BYTES
        self._size = size
        total = self._two_shot + (TWO_SHOT_BYTES if size > 2 else 0)
        self._memory = symm_mem.empty(total, dtype=torch.uint8, device=device)
        # Zeroed before the exchange, because a rank that is ahead soon sets flags.
        self._memory[low_latency : self._two_shot].zero_()
        device_runtime(device).synchronize()
        multicast = envs.TORCH_SYMM_MEM_DISABLE_MULTICAST
        with multicast.override(multicast.get()):
            handle = symm_mem.rendezvous(self._memory, group)
        memories = tuple(handle.buffer_ptrs)
        self._places, self._key_places = (
            [
                PeerParts(memories, flags, handle.rank, size, begin, low_latency)
                for begin in (first, first + length)
            ]
            for first, length in ((ALL_REDUCE_BYTES, self._most), (keys, _KEYS_BYTES))
        )
        self._next = self._next_keys = 0

    def should_allreduce(self, x: torch.Tensor) -> bool:
        """True if `all_reduce` accepts `x`."""
        return self._takes(x.shape, x.dtype, ALL_REDUCE_BYTES) or self._takes_two_shots(
            x.shape, x.dtype
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, a new tensor with the same bits on all of them.

        Args:
            x: A tensor that `should_allreduce` accepts, or one from `empty_part`.
        """
        is_large, part = x.nbytes > ALL_REDUCE_BYTES, x
        if x.untyped_storage().data_ptr() != self._memory.data_ptr():
            begin = self._two_shot if is_large else 0
            part = self._view(begin, x.shape, x.dtype).copy_(x)
        if is_large:
            summed = torch.empty_like(part)
            torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", self._name, summed)
        else:
            summed = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
        return summed

    def should_defer(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True if `defer` accepts tensors of this shape and dtype."""
        return self._takes(shape, dtype, self._most)

    def empty_part(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the next sum, which saves `defer` or `all_reduce` a copy; None: it would not
        be read there."""
        if self.should_defer(shape, dtype):
            return self._view(self._places[self._next].offset, shape, dtype)
        if self._takes_two_shots(shape, dtype):
            return self._view(self._two_shot, shape, dtype)
        return None

    def defer(self, x: torch.Tensor) -> tuple[torch.Tensor, PeerParts]:
        """This rank's partial sum in memory that all ranks read, and the addresses of all ranks'
        partial sums."""
        place = self._places[self._next]
        part = self._view(place.offset, x.shape, x.dtype)
        if x.data_ptr() != part.data_ptr():
            part.copy_(x)
        self._next = 1 - self._next
        return part, place

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts] | None:
        """See `TensorGroup.shared_keys`."""
        if not 0 < count * torch.int64.itemsize <= _KEYS_BYTES:
            return None
        place = self._key_places[self._next_keys]
        self._next_keys = 1 - self._next_keys
        return self._view(place.offset, (count,), torch.int64), place

    def _takes_two_shots(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True if ranks can sum equal shares of a tensor of this shape and dtype."""
        is_shared = torch.Size(shape).numel() % (_ALIGNMENT * self._size) == 0
        return self._size > 2 and is_shared and self._takes(shape, dtype, TWO_SHOT_BYTES)

    def _takes(self, shape: Sequence[int], dtype: torch.dtype, most: int) -> bool:
        size = torch.Size(shape).numel() * dtype.itemsize
        return dtype in _DTYPES and 0 < size <= most and size % _ALIGNMENT == 0

    def _view(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(*shape)

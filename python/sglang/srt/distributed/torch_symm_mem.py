"""Sums of tensors over the GPUs of one machine, which read each other's memory.

A decode step sums some kilobytes twice per layer. A "one shot" kernel, in which every rank reads
and adds all partial sums, takes less time for that than NCCL. Memory, barriers and the kernel are
torch's: docs.pytorch.org, "PyTorch Symmetric Memory". If a norm follows, its kernel computes the
sum (`layers/triton_ops/norm.py`).
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
"""Most bytes of a tensor for `all_reduce`; measured by `python -m benchmark gpu-ranks sums`."""
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

    The memory has five buffers. `all_reduce` has one, and returns when no rank reads it any more.
    Two alternate for sums that norms finish. A norm's kernel waits until all ranks have written
    their partial sums, but not until all have read them. Sum n + 2 reuses the buffer of sum n. When
    a rank begins sum n + 2, all others have begun sum n + 1, so they have finished sum n. Therefore
    the first such sum of a pass must come after an `all_reduce` of any size: the embedding's. The
    last two buffers are for keys, and alternate likewise. The low-latency buffer, to which other
    ranks write, and the flags of barriers between ranks follow.
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
        total = flags + MOST_PROGRAMS * size * _FLAG_BYTES
        self._memory = symm_mem.empty(total, dtype=torch.uint8, device=device)
        # Zeroed before the exchange, because a rank that is ahead soon sets flags.
        self._memory[low_latency:].zero_()
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
        return self._takes(x.shape, x.dtype, ALL_REDUCE_BYTES)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, a new tensor with the same bits on all of them.

        Args:
            x: A tensor that `should_allreduce` accepts, or one from `empty_part`.
        """
        part = x
        if x.untyped_storage().data_ptr() != self._memory.data_ptr():
            part = self._view(0, x.shape, x.dtype).copy_(x)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
        return summed

    def should_defer(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True if `empty_part` and `defer` accept tensors of this shape and dtype."""
        return self._takes(shape, dtype, self._most)

    def empty_part(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the next sum that a norm finishes, which saves `defer` a copy."""
        return self._view(self._places[self._next].offset, shape, dtype)

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

    def _takes(self, shape: Sequence[int], dtype: torch.dtype, most: int) -> bool:
        size = torch.Size(shape).numel() * dtype.itemsize
        return dtype in _DTYPES and 0 < size <= most and size % _ALIGNMENT == 0

    def _view(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(*shape)

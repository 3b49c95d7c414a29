"""Small copies between page-locked memory and a CUDA device, made by a kernel.

A copy engine serves its streams one after another. The few bytes of a step's tokens or inputs
waited for milliseconds behind the hundreds of megabytes of a backup or a load, and the device
idled: 15 ms per prefill of 8,192 tokens on an H200. A kernel copies page-locked memory
concurrently.

Importing this module needs triton.
"""

# ruff: noqa: ANN202  (the language below the decorator is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import ctypes
import threading
from typing import Final

import torch
import triton.language as tl

from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.cuda.bound_kernel import BoundKernel, unspecialized

_WORD: Final = 4
_BLOCK_WORDS: Final = 1024
_MAX_BYTES: Final = 512 * KIB
"""Longest copy, in bytes. Longer ones are worth a copy engine."""
_HALF_BYTES: Final = 4 * MIB
_ALIGNMENT: Final = 16


@unspecialized
def _copy_words(source: tl.int64, target: tl.int64, words: tl.int32, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    values = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=inside)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, values, mask=inside)


_copy: Final = BoundKernel(_copy_words, BLOCK=_BLOCK_WORDS)


class _PinnedRing:
    """Page-locked memory for uploads, in two halves that are filled alternately.

    A half is reused once every stream that reads it has done so.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(2 * _HALF_BYTES, dtype=torch.uint8, pin_memory=True)
        self._half = 0
        self._used = 0
        self._streams: set[torch.cuda.Stream] = set()
        self._read: list[list[torch.cuda.Event]] = [[], []]

    def put(self, data: torch.Tensor, reader: torch.cuda.Stream) -> int:
        """Copy in `data`, contiguous on the CPU, and return its address for one read by
        `reader`."""
        size = data.nbytes
        if self._used + size > _HALF_BYTES:
            self._switch_half()
        address = self._memory.data_ptr() + self._half * _HALF_BYTES + self._used
        ctypes.memmove(address, data.data_ptr(), size)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._streams.add(reader)
        return address

    def _switch_half(self) -> None:
        self._read[self._half] = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        self._half, self._used = 1 - self._half, 0
        for event in self._read[self._half]:
            event.synchronize()
        self._read[self._half].clear()


_lock = threading.Lock()
_ring: _PinnedRing | None = None


def suits(tensor: torch.Tensor) -> bool:
    """True if `tensor` is short enough and consists of whole words."""
    size = tensor.nbytes
    return 0 < size <= _MAX_BYTES and size % _WORD == 0


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor that `suits` to `device`, in order with the current stream, without waiting
    for the device. Any thread."""
    global _ring
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    stream = torch.cuda.current_stream(target.device)  # This device has an index: looked up faster.
    data = tensor.contiguous()
    with _lock:
        _ring = _ring or _PinnedRing()
        # Under the lock, so that no other thread reuses this half before the kernel is queued.
        _launch(_ring.put(data, stream), target.data_ptr(), tensor.nbytes)
    return target


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CUDA tensor that `suits` to page-locked memory, in order with the current stream.

    The copy holds the values once the stream has reached it; the caller keeps it until then.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    source = tensor.contiguous()
    _launch(source.data_ptr(), copy.data_ptr(), source.nbytes)
    return copy


def _launch(source: int, target: int, size: int) -> None:
    words = size // _WORD
    _copy((-(-words // _BLOCK_WORDS), 1, 1), source, target, words)

"""Small copies between page-locked memory and a CUDA device, made by a kernel.

A copy engine serves its streams in turn. Behind the hundreds of megabytes of a backup or a load,
the few bytes of a step's tokens, or of the next step's input, waited for milliseconds, and the
device idled meanwhile: 15 ms a prefill of 8,192 tokens on an H200. A kernel reads and writes
page-locked memory itself, beside them.

Importing this module needs triton.
"""

# ruff: noqa: ANN001, ANN202  (the language below the decorator is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import threading
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.constants import KIB, MIB

_WORD: Final = 4
_BLOCK_WORDS: Final = 1024
_MAX_BYTES: Final = 256 * KIB
"""Longest copy; longer ones are worth a copy engine."""
_HALF_BYTES: Final = 4 * MIB
_ALIGNMENT: Final = 16


@triton.jit(do_not_specialize=["source", "target", "words"])
def _copy_words(source, target, words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    values = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=inside)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, values, mask=inside)


class _PinnedRing:
    """Page-locked memory that uploads pass through: two halves, filled in turn.

    A half is filled again when the device has read what was in it, on every stream that did.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(2 * _HALF_BYTES, dtype=torch.uint8, pin_memory=True)
        # Some callers are in inference mode, others not: torch would not let both write.
        self._bytes = self._memory.numpy()
        self._role = 0
        self._used = 0
        self._streams: set[torch.cuda.Stream] = set()
        self._read: list[list[torch.cuda.Event]] = [[], []]

    def put(self, data: torch.Tensor, reader: torch.cuda.Stream) -> int:
        """Take in `data`, uint8 `[n]` on the CPU; the address that `reader` reads it at, once."""
        if self._used + len(data) > _HALF_BYTES:
            self._turn()
        begin = self._role * _HALF_BYTES + self._used
        self._bytes[begin : begin + len(data)] = data.numpy()
        self._used += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        self._streams.add(reader)
        return self._memory.data_ptr() + begin

    def _turn(self) -> None:
        self._read[self._role] = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        self._role, self._used = 1 - self._role, 0
        for event in self._read[self._role]:
            event.synchronize()
        self._read[self._role].clear()


_lock = threading.Lock()
_ring: _PinnedRing | None = None


def suits(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is short enough and of whole words."""
    size = tensor.nbytes
    return 0 < size <= _MAX_BYTES and size % _WORD == 0


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` of a CPU tensor that `suits`, in order with the current stream.

    Does not wait for the device. Any thread.
    """
    global _ring
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    stream = torch.cuda.current_stream(device)
    data = tensor.contiguous().view(-1).view(torch.uint8)
    with _lock:
        _ring = _ring or _PinnedRing()
        # Under the lock, or another thread might turn to this half before its kernel is queued.
        _launch(_ring.put(data, stream), target.data_ptr(), tensor.nbytes)
    return target


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A page-locked copy of a CUDA tensor that `suits`, in order with the current stream.

    It holds the values once the stream has come so far; the caller keeps it until then.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    source = tensor.contiguous()
    _launch(source.data_ptr(), copy.data_ptr(), source.nbytes)
    return copy


def _launch(source: int, target: int, size: int) -> None:
    words = size // _WORD
    grid = (triton.cdiv(words, _BLOCK_WORDS),)
    _copy_words[grid](source, target, words, BLOCK=_BLOCK_WORDS)

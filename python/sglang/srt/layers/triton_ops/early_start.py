"""Kernels that start before the kernel before them has ended (programmatic dependent launch).

A decode step of few requests is hundreds of kernels of a few microseconds each, so starting and
ending kernels takes a good part of it. A kernel launched with `early_start` is placed on the device
once every program of the previous kernel has allowed it; most programs allow it first of all. Every
program must call `await_kernels_before` or `await_then_start_next`, even one without work. The call
returns when the previous kernel has ended. All earlier kernels have then ended too, because each
waited for the one before it.

A kernel must not write before the call. It may read

- weights;
- data written before a kernel of this step that does not start early, such as the embedding lookup:
  that kernel waited for all earlier ones, and all later ones wait for it;
- data written before a kernel that calls `await_then_start_next`, if that is the previous kernel
  and a large one: its programs have waited on every multiprocessor, so no L1 cache holds old data.

SGLANG_KERNELS_START_EARLY=0 turns it off.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Hopper and
later.
"""

from __future__ import annotations

import functools
from typing import Final, TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime

_FEW_ROWS: Final = 8
SEVERAL_ROWS: Final = 64
"""Most rows of an early start: of kernels in general, and of those of a dense layer, which are
short for longer. Kernels of more rows run so long that their start matters little."""
_FIRST, _SECOND = tl.constexpr(1), tl.constexpr(2)
"""A kernel lets the next one start first of all, or after it has waited."""


class EarlyStart(TypedDict, total=False):
    """Arguments of a launch: one of the kernel's own, and one of Triton's if it starts early."""

    EARLY: int
    launch_pdl: bool


@triton.jit
def await_kernels_before(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait until all kernels before this one have ended; in the
    other order if EARLY says so."""
    if EARLY:
        if EARLY == _FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if EARLY == _SECOND:
            gdc_launch_dependents()


@triton.jit
def await_then_start_next(EARLY: tl.constexpr) -> None:
    """Wait until all kernels before this one have ended, then let the next one start. The next one
    may read their results before its own wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early_start(
    x: torch.Tensor, *, most_rows: int = _FEW_ROWS, is_short: bool = False
) -> EarlyStart:
    """Launch arguments for a kernel that makes one of the two calls above.

    Args:
        x: An input or output of the kernel; its first dimension is the number of rows.
        most_rows: Most rows of an early start.
        is_short: True for a kernel between two large ones, such as a norm. Unless there is only one
            row, it lets the next one start when the one before has ended: while that one fills the
            device, the programs of the next would be placed unevenly.
    """
    if len(x) > most_rows or not _starts_early(x.device):
        return {"EARLY": 0}
    return {"EARLY": 2 if is_short and len(x) > 1 else 1, "launch_pdl": True}


@functools.cache
def _starts_early(device: torch.device) -> bool:
    return envs.SGLANG_KERNELS_START_EARLY.get() and device_runtime(device).starts_kernels_early

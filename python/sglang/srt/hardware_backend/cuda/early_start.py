"""Kernels that start before the kernel before them has ended (programmatic dependent launch).

A decode step of few requests is hundreds of kernels of some microseconds each, so that ends and
starts take a good part of it. A kernel launched with `early_start` is placed on the device as soon
as all programs of the kernel before it have let it start, which most do first of all. Every program
calls `await_kernels_before` or `await_then_start_next`, also one that has nothing to do. The call
returns when the kernel before has ended, which had waited itself: so all kernels before have ended.

Before the call a kernel writes nothing. It reads

- weights;
- what was written before a kernel of the step that does not start early, such as a lookup of
  embeddings: that one has waited for all before, and all behind it wait for it;
- what was written before a kernel that calls `await_then_start_next`, if that is the one before it
  and large: its programs have waited on every multiprocessor, so that no L1 cache holds what was
  there before.

SGLANG_KERNELS_START_EARLY=0 switches it off.

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
"""More rows keep a kernel busy for long; its start is then a small part."""


class EarlyStart(TypedDict, total=False):
    """Arguments of a launch: the kernel's own, and Triton's if it starts early."""

    EARLY: bool
    launch_pdl: bool


@triton.jit  # type: ignore[untyped-decorator]
def await_kernels_before(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait until all kernels before this one have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def await_then_start_next(EARLY: tl.constexpr) -> None:
    """Wait until all kernels before this one have ended, and only then let the next one start: it
    may read what they have written before it waits itself."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early_start(x: torch.Tensor) -> EarlyStart:
    """Arguments for the launch of a kernel that makes one of the two calls.

    Args:
        x: An input or output of the kernel, whose first dimension counts its rows.
    """
    if len(x) <= _FEW_ROWS and _starts_early(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@functools.cache
def _starts_early(device: torch.device) -> bool:
    return envs.SGLANG_KERNELS_START_EARLY.get() and device_runtime(device).starts_kernels_early

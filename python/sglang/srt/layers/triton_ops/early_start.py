"""Kernels that start before the kernel before them has ended (programmatic dependent launch).

A decode step of few requests is hundreds of kernels of some microseconds each, so that ends and
starts take a good part of it. A kernel launched with `early_start` is placed on the device as soon
as all programs of the kernel before it run and have called `await_kernels_before`. It must not
read or write, before it makes that call itself, anything that a kernel of the same step writes:
weights it may read. Every program makes the call, also one that has nothing to do; so when a kernel
has passed it, all kernels before that kernel have ended.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Hopper and
later.
"""

from __future__ import annotations

import functools
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.hardware_backend.device_runtime import device_runtime


class EarlyStart(TypedDict, total=False):
    """Arguments of a launch: the kernel's own, and Triton's if the device can."""

    EARLY: bool
    launch_pdl: bool


@triton.jit
def await_kernels_before(EARLY: tl.constexpr) -> None:
    """Wait until all kernels before this one have ended, and let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def early_start(device: torch.device) -> EarlyStart:
    """Arguments for the launch of a kernel that calls `await_kernels_before`."""
    if device_runtime(device).starts_kernels_early:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}

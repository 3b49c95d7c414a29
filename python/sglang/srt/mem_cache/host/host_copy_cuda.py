"""Copies of whole pages between a device pool on CUDA and page-locked host memory.

There are three ways: copy engines through a device buffer (staged_copy.py); copy engines straight
from or to the pool, for long pages whose device slots the CPU knows; and a Triton kernel that
reads or writes host memory itself, with a launch for each step of a load, and one launch for a
backup. `EngineUse.of` and `prefers_cpu_slots` choose. All ways issue in order with the current
stream and return without waiting for the device. None loops over pages.

Runs where copies are issued: on CUDA on the scheduler's thread, inside a `CopyStream`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import KIB
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.base_device_pool import whole_items
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import (
    PartRows,
    TokenCopyTuning,
    grids_from_pool,
    have_grids,
    is_token_major,
    pages_are_runs,
    part_rows,
    runs_from_pool,
)
from sglang.srt.mem_cache.host.host_layout import IoBackend, suits_copy_engines
from sglang.srt.mem_cache.host.load_steps import StepsInOrder, equal_steps
from sglang.srt.mem_cache.host.page_copier import PageCopier, PageLoad, PoolPair
from sglang.srt.mem_cache.host.staged_copy import LoadTuning, StagedBackup, StagedLoad, StagedPages

# The fewest multiprocessors that come within 1% of the speed of more.
LOAD_TUNING: Final = TokenCopyTuning(programs=8, tile_bytes=65536, num_warps=16)
BACKUP_TUNING: Final = TokenCopyTuning(programs=4, tile_bytes=16384, num_warps=8)
_LONG_RUN_BYTES: Final = 128 * KIB
_GRID_RUN_BYTES: Final = 64 * KIB
"""Grids with runs of this length reach 0.97 of the speed of long runs; runs of 16 KB reach 0.85."""
_STRAIGHT_GRIDS: Final = 8
_STRAIGHT_RUNS: Final = 128
"""Most copies of a load straight into the pool. They take the CPU less than 0.1 ms, and spare it
the upload of slots and a kernel for each part."""
_BACKENDS: Final = (IoBackend.KERNEL.value, IoBackend.DIRECT.value)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Directions that copy engines take; the kernel takes the other ones."""

    load: bool
    backup: bool
    load_of_one_layer: bool = True
    """True if copy engines also load a layer that comes alone."""

    @classmethod
    def of(cls, parts: Sequence[PartRows], page_items: int, io_backend: str) -> EngineUse:
        """Choose the fastest way. `direct`: copy engines move pages that are runs, even short ones.

        Layers that are not parts of a page (`layer_first`) are short runs. Engines write them at
        0.73 to 0.78 of the link's speed, the kernel at 0.93; engines read runs of 128 KB at 0.93 to
        0.96, the kernel at 0.89. The kernel loads token-major pages (`page_first`): engines would
        load all layers at once, so the first layer would wait for the last. The first layer of a
        long load comes alone. If its pages are short runs, the kernel loads it while the engines
        begin with the next layers. That raised 32,768 tokens of indexer keys (16 KB) from 0.78 to
        0.91 of the link's speed, and latent rows (72 KB) from 0.96 to 0.97.
        """
        layer_bytes = min(part.rows.row_bytes for part in parts) * page_items
        first = parts[0]
        if not pages_are_runs(first, page_items):
            return cls(load=layer_bytes >= _LONG_RUN_BYTES, backup=False)
        longest = max(part.rows.row_bytes for part in parts) * page_items
        one = longest >= _LONG_RUN_BYTES
        if io_backend == IoBackend.DIRECT:
            return cls(load=True, backup=True, load_of_one_layer=one)
        is_long = suits_copy_engines(layer_bytes * len(first.device_addresses))
        load = is_long and not is_token_major(first, page_items)
        return cls(load=load, backup=is_long, load_of_one_layer=one)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Whole pages on both sides, checked."""

    host_pages: npt.NDArray[np.int64]
    """int64 `[n]`."""
    device: torch.Tensor
    """int64 `[n * page_items]` on the device: items, in order with the current stream."""

    def pages_on_device(self) -> torch.Tensor:
        """`host_pages` on the device."""
        return device_runtime(self.device.device).stage_to_device(torch.from_numpy(self.host_pages))


class _KernelCopies:
    """Kernels that move pages of a pool between the device and host memory, in one direction."""

    def __init__(self, pool: CudaPageCopier, *, to_host: bool) -> None:
        from sglang.srt.mem_cache.host.token_copy import TokenCopy

        tuning = pool.backup_tuning if to_host else pool.load_tuning
        self._copies: list[tuple[TokenCopy, tuple[int, ...]]] = []
        for group, table in pool.groups:
            first = group[0]
            copy = TokenCopy(
                first.rows,
                table,
                first.device_stride,
                pool.pools.page_items,
                to_host=to_host,
                tuning=tuning,
            )
            copy.compile()
            self._copies.append((copy, tuple(part.host_address for part in group)))

    def copy(self, host_pages: torch.Tensor, slots: torch.Tensor, layers: range) -> None:
        """Queue the copies of `layers` in the current stream; both tensors are on the device."""
        for copy, addresses in self._copies:
            copy.copy(addresses, host_pages, slots, layers)


class _Load(PageLoad):
    """Pages that copy engines load, or kernels, some layers at a time."""

    def __init__(
        self,
        slots: _Slots,
        steps: Sequence[range],
        kernels: _KernelCopies | None,
        staged: StagedPages | None,
    ) -> None:
        """Args:
        kernels: They load layers that come alone, or all if nothing is `staged`.
        """
        self._slots = slots
        self._steps = StepsInOrder(steps)
        self._kernels = kernels
        self._staged = staged

    @functools.cached_property
    def _host_pages(self) -> torch.Tensor:
        return self._slots.pages_on_device()

    def issue(self, layer: int) -> None:
        layers = self._steps.of(layer)
        if layers is None:
            return
        if self._staged is not None and (self._kernels is None or len(layers) > 1):
            self._staged.load(layers)
        else:
            assert self._kernels is not None, "something loads the pages"
            self._kernels.copy(self._host_pages, self._slots.device, layers)


class _StraightLoad(PageLoad):
    """Pages that copy engines put into the pool itself."""

    def __init__(
        self,
        pool: CudaPageCopier,
        host_pages: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        steps: Sequence[range],
    ) -> None:
        self._pool = pool
        self._pages = host_pages, device_pages
        self._steps = StepsInOrder(steps)
        self._stream = pool.runtime.here().handle

    def issue(self, layer: int) -> None:
        layers = self._steps.of(layer)
        if layers is not None:
            self._pool.copy_straight(*self._pages, layers, self._stream, to_host=False)


class CudaPageCopier(PageCopier):
    """Copies between one pair of pools; holds what stays the same from copy to copy."""

    def __init__(self, pools: PoolPair) -> None:
        self.parts = tuple(
            part_rows(host, device) for host, device in zip(pools.host, pools.device, strict=True)
        )
        page_items = pools.page_items
        self.pools = pools
        self.device = pools.device[0][0].device
        self.runtime = device_runtime(self.device)
        self.num_layers = len(self.parts[0].device_addresses)
        self.load_tuning = LOAD_TUNING
        self.backup_tuning = BACKUP_TUNING
        self.tuning_of_loads = LoadTuning()
        self.engine_use = {io: EngineUse.of(self.parts, page_items, io) for io in _BACKENDS}
        first = self.parts[0]
        same = all(
            (part.rows, part.device_stride) == (first.rows, first.device_stride)
            for part in self.parts
        )
        together = [self.parts] if same else [(part,) for part in self.parts]
        self.groups = [(group, self._device_table(group)) for group in together]
        """Parts with equal rows move in one launch; with each its table of device addresses."""
        layer_bytes = sum(part.rows.row_bytes for part in self.parts) * page_items
        self._mean_run_bytes = layer_bytes / len(self.parts)
        self._has_grids = all(have_grids(part) for part in self.parts)
        self._page_bytes = layer_bytes * self.num_layers

    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        """See `PageCopier.backup`. `io_backend` is `kernel` or `direct`."""
        _check_backend(io_backend)
        if device_indices.is_cpu and self.prefers_cpu_slots(io_backend):
            host_pages, device_pages = self.pools.pages(host_indices, device_indices)
            assert device_pages is not None, "the slots are on the CPU"
            layers, stream = range(self.num_layers), self.runtime.here().handle
            self.copy_straight(host_pages, device_pages, layers, stream, to_host=True)
            return
        slots = self._slots(host_indices, device_indices, staged)
        if self.engine_use[io_backend].backup:
            self._staged_backup.backup(slots.host_pages, slots.device)
            return
        pages = slots.pages_on_device()
        self._backup_kernels.copy(pages, slots.device, range(self.num_layers))

    def prefers_cpu_slots(self, io_backend: str) -> bool:
        """True if a backup needs no kernels when its device slots are on the CPU.

        Copy engines take such pages from the pool itself, a grid of runs for all layers of a page,
        and slow down no other work. If every prompt is backed up and none hits, kernels that gather
        pages into a buffer cost 1.2% of the throughput; one copy for each layer, 36 times as many
        copies, cost 0.5%. The mean length of the runs decides: a recurrent state has 2 MB in
        a layer, and 48 KB of convolution.
        """
        first = self.parts[0]
        return (
            self.engine_use[io_backend].backup
            and first.rows.has_page_runs(self.pools.page_items)
            and first.has_device_runs
            and self._mean_run_bytes >= (_GRID_RUN_BYTES if self._has_grids else _LONG_RUN_BYTES)
        )

    def copy_straight(
        self,
        host_pages: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        layers: range,
        stream: int,
        *,
        to_host: bool,
    ) -> None:
        """Let copy engines move `layers` of pages between the two pools, in a stream (a handle)."""
        pages = self.pools.page_items, host_pages, device_pages, layers
        if not self._has_grids:
            runs = runs_from_pool(self.parts, *pages)
            self.engine.copy(runs if to_host else runs.back(), stream)
            return
        for grids in grids_from_pool(self.parts, *pages):
            self.engine.copy_grids(grids if to_host else grids.back(), stream)

    def begin_load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        """See `PageCopier.begin_load`. `io_backend` is `kernel` or `direct`."""
        if steps is None:
            num_pages = len(host_indices) // self.pools.page_size
            steps = self.load_steps(num_pages, io_backend, num_pages * self._page_bytes)
        if device_indices.is_cpu and self.loads_straight(len(device_indices), io_backend):
            host_pages, device_pages = self.pools.pages(host_indices, device_indices)
            assert device_pages is not None, "the slots are on the CPU"
            return _StraightLoad(self, host_pages, device_pages, steps)
        slots = self._slots(host_indices, device_indices, staged)
        use = self.engine_use[io_backend]
        if not use.load:
            return _Load(slots, steps, self._load_kernels, None)
        kernels = None if use.load_of_one_layer else self._load_kernels
        under_way = self._staged_load.start(slots.host_pages, slots.device, steps)
        return _Load(slots, steps, kernels, under_way)

    def loads_straight(self, num_slots: int, io_backend: str) -> bool:
        """True for few long pages, such as a recurrent state: copy engines put them into the pool
        itself. Many pages come sooner in one batch of copies, and a kernel spreads them."""
        num_copies = num_slots // self.pools.page_size * len(self.parts)
        if self._has_grids:
            is_few = num_copies <= _STRAIGHT_GRIDS
        else:
            is_few = num_copies * self.num_layers <= _STRAIGHT_RUNS
        return is_few and self.engine_use[io_backend].load and self.prefers_cpu_slots(io_backend)

    def load_steps(self, num_pages: int, io_backend: str, load_bytes: int) -> tuple[range, ...]:
        """See `PageCopier.load_steps`. `io_backend` is `kernel` or `direct`."""
        _check_backend(io_backend)
        if self.engine_use[io_backend].load:
            return self._staged_load.steps(num_pages, load_bytes)
        count = self.tuning_of_loads.steps_of_short(load_bytes)
        return equal_steps(self.num_layers, self.num_layers if count is None else count)

    # Made on first use, when the controller warms up.

    @functools.cached_property
    def engine(self) -> CopyEngine:
        """Copy engines of the device."""
        return CopyEngine()

    @functools.cached_property
    def _load_kernels(self) -> _KernelCopies:
        return _KernelCopies(self, to_host=False)

    @functools.cached_property
    def _backup_kernels(self) -> _KernelCopies:
        return _KernelCopies(self, to_host=True)

    @functools.cached_property
    def _staged_backup(self) -> StagedBackup:
        return StagedBackup(self.groups, self.pools.page_items, self.device, self.engine)

    @functools.cached_property
    def _staged_load(self) -> StagedLoad:
        return StagedLoad(
            self.groups, self.pools.page_items, self.device, self.engine, self.tuning_of_loads
        )

    def _slots(
        self, host: torch.Tensor, device: torch.Tensor, staged: torch.Tensor | None
    ) -> _Slots:
        pages, _ = self.pools.pages(host, device)
        # Made on another stream and maybe freed there while this one still reads it.
        self.runtime.keep_for_current_stream(device)
        items = whole_items(device if staged is None else staged, self.pools.stride)
        return _Slots(pages, self.runtime.stage_to_device(items))

    def _device_table(self, group: Sequence[PartRows]) -> torch.Tensor:
        addresses = [part.device_addresses for part in group]
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)


def _check_backend(io_backend: str) -> None:
    if io_backend not in _BACKENDS:
        raise ValueError(f"io_backend {io_backend}: CUDA pools copy with kernel or direct")

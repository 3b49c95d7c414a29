"""Copies of whole pages between a device pool on CUDA and page-locked host memory.

Three ways: copy engines through a device buffer (staged_copy.py); copy engines straight from the
pool, for backups of long pages whose device slots the CPU knows; and one Triton kernel that reads
or writes host memory itself, a launch a layer to load, one launch for all layers to back up. Which
of them, `EngineUse.of` and `prefers_cpu_slots` say. All issue in order with the current stream and
return without waiting for the device. None loops over pages.

Called by whoever issues copies: on CUDA that is the scheduler's thread, inside a `CopyStream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sglang.srt.constants import KIB
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import is_token_major, pages_are_runs, runs_from_pool
from sglang.srt.mem_cache.host.host_layout import IoBackend, suits_copy_engines
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_rows import PartRows, TokenCopyTuning
from sglang.srt.mem_cache.host.staged_copy import StagedBackup, StagedLoad, StagedLoadTuning
from sglang.srt.utils.device import (
    current_stream_handle,
    keep_for_current_stream,
    stage_to_device,
)

# As few multiprocessors as come within 1% of what more of them reach.
LOAD_TUNING: Final = TokenCopyTuning(programs=8, tile_bytes=65536, num_warps=16)
BACKUP_TUNING: Final = TokenCopyTuning(programs=4, tile_bytes=16384, num_warps=8)
_LONG_RUN_BYTES: Final = 128 * KIB
_BACKENDS: Final = (IoBackend.KERNEL.value, IoBackend.DIRECT.value)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Which directions are left to copy engines."""

    load: bool
    backup: bool

    @classmethod
    def of(cls, parts: Sequence[PartRows], page_size: int, io_backend: str) -> EngineUse:
        """What is fastest; `direct` leaves pages that are runs to copy engines even if short.

        Layers that are not parts of a page (`layer_first`) are short runs: engines write them at
        0.73 to 0.78 of the link, the kernel at 0.93, and read those of 128 KB at 0.93 to 0.96, the
        kernel at 0.89. Token-major pages (`page_first`) would come with all of their layers at
        once, so that the first one waits for the last: the kernel loads them.
        """
        layer_bytes = min(part.rows.row_bytes for part in parts) * page_size
        first = parts[0]
        if not pages_are_runs(first, page_size):
            return cls(load=layer_bytes >= _LONG_RUN_BYTES, backup=False)
        is_long = suits_copy_engines(layer_bytes * len(first.device_addresses))
        if io_backend == IoBackend.DIRECT:
            return cls(load=True, backup=True)
        return cls(load=is_long and not is_token_major(first, page_size), backup=is_long)


class PageCopy(ABC):
    """One set of pages on its way. Lives until its last layer is issued."""

    @abstractmethod
    def issue(self, layers: range, *, to_host: bool) -> None:
        """Queue the copies of `layers` in the current stream."""


class _KernelCopy(PageCopy):
    def __init__(self, pool: CudaPageCopier, host: torch.Tensor, device: torch.Tensor) -> None:
        self._pool = pool
        whole_pages(host, pool.page_size, pool.host_pages)
        if device.is_cpu:
            whole_pages(device, pool.page_size, pool.device_pages)
        # Made on another stream and maybe freed there while this one still reads it.
        keep_for_current_stream(device)
        self._host_slots = stage_to_device(host, pool.device)
        self._device_slots = stage_to_device(device, pool.device)

    def issue(self, layers: range, *, to_host: bool) -> None:
        from sglang.srt.mem_cache.host.token_copy import copy_tokens

        for group, table in self._pool.groups:
            copy_tokens(
                tuple(part.host_address for part in group),
                group[0].rows,
                table,
                self._host_slots,
                self._device_slots,
                layers,
                to_host=to_host,
                tuning=self._pool.backup_tuning if to_host else self._pool.load_tuning,
            )


class _StagedLoad(PageCopy):
    def __init__(
        self, pool: CudaPageCopier, stage: StagedLoad, host: torch.Tensor, device: torch.Tensor
    ) -> None:
        self._stage = stage
        pages = whole_pages(host, pool.page_size, pool.host_pages)
        if device.is_cpu:
            whole_pages(device, pool.page_size, pool.device_pages)
        keep_for_current_stream(device)
        self._chunks = stage.start(pages, stage_to_device(device, pool.device))
        self._num_layers = pool.num_layers
        self._issued_until = 0

    def issue(self, layers: range, *, to_host: bool) -> None:
        assert not to_host
        if layers.stop <= self._issued_until:
            return
        if self._stage.layers_at_once == self._num_layers:
            layers, in_order = range(self._num_layers), True
        else:
            # A load goes from layer 0 on; one that starts elsewhere is of that layer alone.
            in_order = layers.start == self._issued_until
            step = self._stage.layers_at_once if in_order and layers.start else 1
            layers = range(layers.start, min(layers.start + step, self._num_layers))
        self._stage.load(self._chunks, layers)
        if in_order:
            self._issued_until = layers.stop


class CudaPageCopier:
    """What stays the same between the copies of one pair of pools.

    Args:
        parts: K and V.
        page_size: Tokens.
        host_pages: Pages in the host pool.
        device_pages: Pages in the device pool, the padding page included.
        device: Of the device pool.
    """

    def __init__(
        self,
        parts: Sequence[PartRows],
        page_size: int,
        host_pages: int,
        device_pages: int,
        device: torch.device,
    ) -> None:
        self.parts = tuple(parts)
        self.page_size = page_size
        self.host_pages = host_pages
        self.device_pages = device_pages
        self.device = device
        self.num_layers = len(parts[0].device_addresses)
        self.load_tuning = LOAD_TUNING
        self.backup_tuning = BACKUP_TUNING
        self.staged_load_tuning = StagedLoadTuning()
        self.engine_use = {io: EngineUse.of(self.parts, page_size, io) for io in _BACKENDS}
        first = self.parts[0].rows
        same = all(part.rows == first for part in self.parts)
        together = [self.parts] if same else [(part,) for part in self.parts]
        self.groups = [(group, self._device_table(group)) for group in together]
        """Parts with equal rows move in one launch; with each its table of device addresses."""
        self._engine: CopyEngine | None = None
        self._staged: StagedBackup | None = None
        self._staged_load: StagedLoad | None = None
        self._loading: tuple[torch.Tensor, torch.Tensor, PageCopy] | None = None

    def backup(self, host: torch.Tensor, device: torch.Tensor, io_backend: str) -> None:
        """Copy all layers of the pages of these slots to the host.

        Args:
            host: int64 `[tokens]` on the CPU.
            device: int64 `[tokens]` on the CPU or the device.
            io_backend: `kernel` or `direct`.

        Raises:
            ValueError: Slots that the CPU can see are not whole pages of their pool.
        """
        _check_backend(io_backend)
        check_equally_many(host, device)
        if device.is_cpu and self.prefers_cpu_slots(io_backend):
            self._backup_runs(host, device)
        elif self.engine_use[io_backend].backup:
            self._backup_staged(host, device)
        else:
            _KernelCopy(self, host, device).issue(range(self.num_layers), to_host=True)

    def prefers_cpu_slots(self, io_backend: str) -> bool:
        """Whether a backup whose device slots are on the CPU spares the device its kernels.

        Copy engines take such pages from the pool itself, a run for each layer: at 0.75 of the
        link instead of 0.95, but beside it nothing runs slower. The kernels that gather pages into
        a buffer took 1.2% of the throughput where every prompt is backed up and none hits.
        """
        first = self.parts[0]
        return (
            self.engine_use[io_backend].backup
            and first.rows.has_page_runs(self.page_size)
            and min(part.rows.row_bytes for part in self.parts) * self.page_size >= _LONG_RUN_BYTES
        )

    def _backup_runs(self, host: torch.Tensor, device: torch.Tensor) -> None:
        host_pages = whole_pages(host, self.page_size, self.host_pages)
        device_pages = whole_pages(device, self.page_size, self.device_pages)
        runs = runs_from_pool(self.parts, self.page_size, host_pages, device_pages)
        self._copy_engine().copy(runs, current_stream_handle(self.device))

    def _backup_staged(self, host: torch.Tensor, device: torch.Tensor) -> None:
        pages = whole_pages(host, self.page_size, self.host_pages)
        if device.is_cpu:
            whole_pages(device, self.page_size, self.device_pages)
        keep_for_current_stream(device)
        if self._staged is None:
            self._staged = StagedBackup(
                self.groups, self.page_size, self.device, self._copy_engine()
            )
        self._staged.backup(pages, stage_to_device(device, self.device))

    def load_layer(
        self, host: torch.Tensor, device: torch.Tensor, layer: int, io_backend: str
    ) -> None:
        """Copy one layer to the device; otherwise as `backup`.

        Layers that follow may come with it: they are part of the same load.
        Indices are checked and staged once for all layers of a load, so they must not change
        before its last one. Layer 0 starts afresh.
        """
        known, self._loading = self._loading, None
        if layer and known is not None and known[0] is host and known[1] is device:
            copy = known[2]
        else:
            copy = self._prepare(host, device, io_backend)
        copy.issue(range(layer, layer + 1), to_host=False)
        if layer + 1 < self.num_layers:
            self._loading = (host, device, copy)

    def _prepare(self, host: torch.Tensor, device: torch.Tensor, io_backend: str) -> PageCopy:
        check_equally_many(host, device)
        _check_backend(io_backend)
        if not self.engine_use[io_backend].load:
            return _KernelCopy(self, host, device)
        if self._staged_load is None:
            self._staged_load = StagedLoad(
                self.groups,
                self.page_size,
                self.device,
                self._copy_engine(),
                self.staged_load_tuning,
            )
        return _StagedLoad(self, self._staged_load, host, device)

    def _copy_engine(self) -> CopyEngine:
        if self._engine is None:
            self._engine = CopyEngine()
        return self._engine

    def _device_table(self, group: Sequence[PartRows]) -> torch.Tensor:
        addresses = [part.device_addresses for part in group]
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)


def _check_backend(io_backend: str) -> None:
    if io_backend not in _BACKENDS:
        raise ValueError(f"io_backend {io_backend}: CUDA pools copy with kernel or direct")


def check_equally_many(host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
    """Raise ValueError unless there is one device slot for each host slot."""
    if len(host_indices) != len(device_indices):
        raise ValueError(
            f"{len(host_indices)} host_indices for {len(device_indices)} device_indices"
        )

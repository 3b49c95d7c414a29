"""The rig of `gpu-hicache copies`: two streams timed by events, and a pair of pools.

Pages are at random places of both pools, their bytes are random, and copied bytes are compared.
Loads are issued as by the engine: layer by layer, with an event each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from sglang.srt.hardware_backend.device_runtime import CopyStream, device_runtime
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec
from sglang.srt.mem_cache.device.pool_registry import make_pools
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_pool import MambaSpec, StatePool
from sglang.srt.mem_cache.device.state_spec import ItemKind, KVSpec, PoolName, StateSpec
from sglang.srt.mem_cache.memory_pool_host import (
    HostPoolGroup,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
    PoolEntry,
)


@dataclass(frozen=True)
class Kind:
    """A kind of state, and the class of its pool on the host."""

    spec: StateSpec
    host: Any


KV = Kind(KVSpec.of_heads(tuple(range(36)), 8, 128, torch.bfloat16), MHATokenToKVPoolHost)
KINDS = {
    "kv": KV,
    "latent": Kind(MLASpec.of(range(61), 512, 64, torch.bfloat16), MLATokenToKVPoolHost),
    "indexer": Kind(
        replace(IndexerSpec.of(range(61), 128, torch.bfloat16), indices_from_pool=None),
        NSAIndexerPoolHost,
    ),
    "states": Kind(
        MambaSpec.of_shapes(
            tuple(range(36)), (32, 128, 128), (8192, 3),
            ssm_dtype=torch.float32, conv_dtype=torch.bfloat16,
        ),
        MambaPoolHost,
    ),
}  # fmt: skip
"""Kinds of state: keys and values of Qwen3-8B; latent rows and indexer keys of DeepSeek-V3.2, in
separate slots here; recurrent states of Qwen3-Next-80B-A3B."""
TOKENS_OF_STATE = 1024
"""Tokens for which one state is copied."""

Work: TypeAlias = Callable[[], None]


class Timeline:
    """Runs work on a load and a write stream and times it with events."""

    def __init__(self) -> None:
        runtime = device_runtime("cuda")
        self.load = runtime.make_copy_stream("bench-load")
        self.write = runtime.make_copy_stream("bench-write")

    def seconds(self, load: Work | None, write: Work | None, repeat: int) -> tuple[float, float]:
        """Median seconds of one direction: of the device, and of the CPU to issue it."""
        stream, work = (self.load, load) if load is not None else (self.write, write)
        assert work is not None
        device, issue = [], []
        for turn in range(repeat + 1):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            start, end = self._submit(stream, work)
            issued = time.perf_counter() - started
            torch.accelerator.synchronize()
            if turn:  # The first turn compiles and warms up.
                device.append(start.elapsed_time(end) / 1e3)
                issue.append(issued)
        return statistics.median(device), statistics.median(issue)

    def copies_per_second(self, load: Work, write: Work, repeat: int) -> float:
        """Median of the copies per second of both directions together, while both are under way.

        Each direction has a thread that issues four copies. The measurement ends when the first
        direction ends; the unfinished copy of the other direction counts in part.
        """
        rates = []
        with ThreadPoolExecutor(2) as threads:
            for turn in range(repeat + 1):
                torch.accelerator.synchronize()
                rounds = [
                    threads.submit(self._submit_four, self.load, load),
                    threads.submit(self._submit_four, self.write, write),
                ]
                marks = [round.result() for round in rounds]
                torch.accelerator.synchronize()
                if turn:
                    rates.append(_rate_of_both(marks))
        return statistics.median(rates)

    def _submit_four(self, stream: CopyStream, work: Work) -> list[tuple[torch.Event, torch.Event]]:
        return [self._submit(stream, work) for _ in range(4)]

    def _submit(self, stream: CopyStream, work: Work) -> tuple[torch.Event, torch.Event]:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))

        def timed() -> None:
            start.record()
            work()
            end.record()

        stream.submit(timed)
        return start, end


def _rate_of_both(marks: list[list[tuple[torch.Event, torch.Event]]]) -> float:
    zero = marks[0][0][0]
    spans = [
        [(zero.elapsed_time(start), zero.elapsed_time(end)) for start, end in one] for one in marks
    ]
    first = max(one[0][0] for one in spans)
    last = min(one[-1][1] for one in spans)
    done = sum(
        max(0.0, min(end, last) - max(start, first)) / (end - start)
        for one in spans
        for start, end in one
    )
    return done / (last - first) * 1e3


class PoolsTogether:
    """Pools that move together, as those of one model do: latent rows and indexer keys."""

    def __init__(self, all_pools: Sequence[Pools]) -> None:
        self._all = all_pools
        self._group = HostPoolGroup(
            [
                PoolEntry.of(pools.host, pools.device, is_primary=pools is all_pools[0])
                for pools in all_pools
            ]
        )
        self._io_backend = all_pools[0].io_backend
        self.bytes = sum(pools.bytes for pools in all_pools)

    def backup(self) -> None:
        self._group.backup([pools.transfer() for pools in self._all], self._io_backend)

    def backup_elsewhere(self) -> None:
        self._group.backup([pools.transfer_elsewhere() for pools in self._all], self._io_backend)

    def load(self, first: torch.Event | None = None) -> None:
        """As `Pools.load`."""
        transfers = [replace(pools.transfer(), device_indices=pools.target) for pools in self._all]
        steps = self._group.load_steps(transfers, self._io_backend)
        events = [torch.Event("cuda") for _ in steps.issued]
        if first is not None:
            events[0] = first
        self._group.load(transfers, steps, events, self._io_backend)

    def check(self) -> None:
        for pools in self._all:
            pools.check()


class Pools:
    """A device pool and a host pool, and two disjoint scattered sets of pages in each."""

    def __init__(
        self, timeline: Timeline, kind: Kind, layout: str, io_backend: str, page_size: int,
        tokens: int,
    ) -> None:  # fmt: skip
        self.io_backend = io_backend
        spec = kind.spec
        is_state = spec.item is ItemKind.STATE
        self.page_size = 1 if is_state else page_size
        count = tokens // (TOKENS_OF_STATE if is_state else page_size)
        size = 2 * count * self.page_size
        pools = make_pools([spec], size, self.page_size, "cuda", size)
        self.device = pools[PoolName(spec.name)]
        for buffer in self._buffers():
            buffer.normal_()
        self.host = kind.host.make(self.device, page_num=2 * count, layout=layout)
        self.bytes = count * self.host.page_bytes
        torch.manual_seed(0)
        device_pages = torch.randperm(2 * count) + 1
        host_pages = torch.randperm(2 * count)
        self.source, self.target = (
            self._slots(pages).to("cuda") for pages in (device_pages[:count], device_pages[count:])
        )
        self.host_slots, self.other_host_slots = (
            self._slots(pages) for pages in (host_pages[:count], host_pages[count:])
        )
        # Fills the page-locked memory, which would be zeros otherwise.
        timeline.write.submit(self.backup)
        torch.accelerator.synchronize()

    def _buffers(self) -> list[torch.Tensor]:
        """The buffers of each layer, one item a slot."""
        pool: BaseDevicePool = self.device
        if isinstance(pool, StatePool):
            return [layer for buffer in pool.buffers for layer in buffer]
        assert isinstance(pool, PagedDevicePool)
        return [layer for part in pool.parts for layer in part]

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def transfer(self) -> PoolTransfer:
        return PoolTransfer(self.device.spec.name, self.host_slots, self.source)

    def transfer_elsewhere(self) -> PoolTransfer:
        return PoolTransfer(self.device.spec.name, self.other_host_slots, self.source)

    def backup(self) -> None:
        self.host.backup_from_device_all_layer(
            self.device, self.host_slots, self.source, self.io_backend
        )

    def backup_elsewhere(self) -> None:
        self.host.backup_from_device_all_layer(
            self.device, self.other_host_slots, self.source, self.io_backend
        )

    def load(self, first: torch.Event | None = None) -> None:
        """Load with an event for each layer, as the engine does; `first` is the first event."""
        load = self.host.begin_load(self.device, self.host_slots, self.target, self.io_backend)
        for layer in range(self.device.layer_num):
            load.issue(layer)
            event = torch.Event("cuda") if layer or first is None else first
            event.record()

    def check(self) -> None:
        """Assert that the loaded bytes equal the original ones."""
        for buffer in self._buffers():
            raw = buffer.view(torch.int16)
            assert torch.equal(raw[self.target], raw[self.source]), "the bytes differ"

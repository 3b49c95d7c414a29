"""Short memory on one rank at a time: allocations fail at random, independently.

Slots, pages, states and rows are allocated alike on all ranks: they are numbers in equal states.
Memory of the system may fail on a single rank: buffers, threads, a client of L3.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final
from unittest.mock import patch

import torch

from rigs.stores import chaotic_store
from sglang.srt.mem_cache.host import page_copier
from sglang.srt.mem_cache.storage import base as storage_base
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

BUFFER_OF_A_COPY: Final = "buffer of a copy"
BUFFER_OF_L3: Final = "buffer of L3"
CLIENT: Final = "client of L3"
THREAD: Final = "thread of L3"
_THREADS_OF_L3: Final = (
    "hicache-administration", "hicache-prefetch", "hicache-backup", "hicache-probe",
    "hicache-presence",
)  # fmt: skip


class ShortMemory:
    """Lets allocations fail. Any thread.

    Args:
        sites: Places of allocations, of those above.
        chance: Chance that an allocation there fails, from 0 to 1.
        seed: Seed of the draws, whose order depends on the threads.
    """

    def __init__(self, sites: Iterable[str], chance: float, seed: int) -> None:
        self._sites = frozenset(sites)
        self._chance = chance
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.failed: Counter[str] = Counter()
        """Allocations that have failed, by site."""

    def fails(self, site: str) -> bool:
        """True if this allocation fails."""
        with self._lock:
            fails = site in self._sites and self._rng.random() < self._chance
            self.failed[site] += fails
        return fails

    @contextlib.contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Let allocations of every rank of this process fail with that chance."""
        gather, create = page_copier._gathered, StorageBackendFactory.create_backend
        start = threading.Thread.start

        def gathered(*args: Any) -> Any:
            if self.fails(BUFFER_OF_A_COPY):
                raise MemoryError("Unable to allocate 1. MiB")
            return gather(*args)

        def create_backend(*args: Any, **kwargs: Any) -> Any:
            if self.fails(CLIENT):
                raise MemoryError("Mooncake could not allocate 1048576 bytes of host memory")
            return create(*args, **kwargs)

        def start_thread(thread: threading.Thread) -> None:
            if thread.name in _THREADS_OF_L3 and self.fails(THREAD):
                raise RuntimeError("can't start new thread")
            start(thread)

        torch_of_l3 = _TorchOf(self)
        with (
            patch.object(page_copier, "_gathered", gathered),
            patch.object(storage_base, "torch", torch_of_l3),
            patch.object(chaotic_store, "torch", torch_of_l3),
            patch.object(StorageBackendFactory, "create_backend", create_backend),
            patch.object(threading.Thread, "start", start_thread),
        ):
            yield


class _TorchOf:
    """torch, whose `empty` fails as on a CPU without memory."""

    def __init__(self, memory: ShortMemory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._memory.fails(BUFFER_OF_L3):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return torch.empty(*args, **kwargs)

"""Faults for one rank of a real server: `ForkedServer(in_rank=...)` plants them in its process."""

from __future__ import annotations

import os
import signal
from typing import Final
from unittest import mock

from sglang.srt.mem_cache.tiers.hiradix_cache import HiRadixCache
from sglang.srt.model_loader import checkpoint_files

FAULTY: Final = 1
"""The rank that has the fault."""
DAMAGE: Final = "model.safetensors: the bytes of this rank are damaged"
NO_MEMORY: Final = "L2 of this rank does not fit"


def cannot_read_weights(rank: int) -> None:
    """Its checkpoint is damaged, as on a disk of its own."""
    if rank == FAULTY:
        damaged = ValueError(DAMAGE)
        mock.patch.object(checkpoint_files, "_fill_from_safetensors", side_effect=damaged).start()


def has_no_memory(rank: int) -> None:
    """Its host pool cannot be allocated."""
    if rank == FAULTY:
        no_room = ValueError(NO_MEMORY)
        mock.patch.object(HiRadixCache, "build_host_stack", side_effect=no_room).start()


def dies_while_it_starts(rank: int) -> None:
    """Killed before it meets the others, as by the kernel where memory is short."""
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)


def evicts_by_itself(rank: int) -> None:
    """Once, in the first tick of the ballot in which it has pages on the host that nothing uses."""
    if rank != FAULTY:
        return
    check = HiRadixCache.check_hicache_events

    def evict_and_check(tree: HiRadixCache) -> None:
        if tree.evict_host(1):
            patched.stop()
        check(tree)

    patched = mock.patch.object(HiRadixCache, "check_hicache_events", evict_and_check)
    patched.start()

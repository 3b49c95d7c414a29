"""Faults for one rank of a real server: `ForkedServer(in_rank=...)` plants them in its process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Transfer
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.l2 import cache_controller
from sglang.srt.model_loader import checkpoint_files, remote_weights
from sglang.srt.models.llama import LlamaDecoderLayer
from sglang.srt.process.tick_watchdog import TickWatchdog

FAULTY: Final = 1
"""The rank that has the fault."""
DAMAGE: Final = "model.safetensors: the bytes of this rank are damaged"
NO_MEMORY: Final = "L2 of this rank does not fit"


def cannot_read_weights(rank: int) -> None:
    """The rank's checkpoint is damaged, as on a disk of its own."""
    if rank == FAULTY:
        damaged = ValueError(DAMAGE)
        mock.patch.object(checkpoint_files, "_SafetensorsFiles", side_effect=damaged).start()


def has_no_memory(rank: int) -> None:
    """The rank's host pool cannot be allocated."""
    if rank == FAULTY:
        no_room = ValueError(NO_MEMORY)
        mock.patch.object(cache_controller, "build_kv_host_stack", side_effect=no_room).start()


def dies_while_it_starts(rank: int) -> None:
    """The rank is killed before it meets the others, as by the kernel when memory is short."""
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)


def evicts_by_itself(rank: int) -> None:
    """The rank evicts once, in the first tick in which it has unused pages on the host."""
    if rank != FAULTY:
        return
    check = HiRadixCache.check_hicache_events

    def evict_and_check(tree: HiRadixCache) -> None:
        if tree.evict_host(1):
            patched.stop()
        check(tree)

    patched = mock.patch.object(HiRadixCache, "check_hicache_events", evict_and_check)
    patched.start()


def hangs_in_a_tick(rank: int) -> None:
    """The rank's scheduler stands still in its 30th tick, while its process and its other threads
    go on. The others wait for it, and leave it to its own watchdog to end the server: else theirs
    may be the first."""
    if rank != FAULTY:
        mock.patch.object(TickWatchdog, "_watch").start()
        return
    check = HiRadixCache.check_hicache_events
    ticks: list[None] = []

    def hang(tree: HiRadixCache) -> None:
        ticks.append(None)
        if len(ticks) == 30:
            threading.Event().wait()
        check(tree)

    mock.patch.object(HiRadixCache, "check_hicache_events", hang).start()


STAGES: Final[dict[str, tuple[type, str]]] = {
    "prefill": (LlamaDecoderLayer, "forward"),
    "load": (HostPoolGroup, "load"),
    "write": (HiCacheFile, "batch_set_v2"),
    "read": (HiCacheFile, "batch_get_v2"),
}
"""Methods that run once a scheduler has begun to tick: in a prefill, a load from L2, a write to L3
and a read from it."""
_SHORT: Final = 20
"""Prefills of fewer tokens are left alone."""


def ends_in(stage: str, sig: signal.Signals, rank: int) -> None:
    """The rank gets a signal in the second layer of a prefill, or before a copy."""
    if rank != FAULTY:
        return
    owner, name = STAGES[stage]
    method: Callable[..., Any] = getattr(owner, name)
    calls: list[None] = []

    def end(*args: Any, **kwargs: Any) -> Any:
        step = next((one for one in args if isinstance(one, LayerStep)), None)
        if step is None or len(step.batch.input_ids) >= _SHORT:
            calls.append(None)
        if calls and (step is None or len(calls) == 2):
            os.kill(os.getpid(), sig)
        return method(*args, **kwargs)

    def arm(tree: HiRadixCache) -> None:
        first_tick.stop()
        mock.patch.object(owner, name, end).start()
        tree.check_hicache_events()

    first_tick = mock.patch.object(HiRadixCache, "check_hicache_events", arm)
    first_tick.start()


def kills_while_it_reads_weights(victim: int | None, rank: int) -> None:
    """The rank kills process `victim` (None: itself) after its third batch of a server's weights.

    Batches are small.
    """
    if rank != FAULTY:
        return
    transfer = MooncakeTransferEngine.transfer
    calls: list[object] = []

    def kill_and_transfer(*args: Any, **kwargs: Any) -> Transfer:
        calls.append(args)
        if len(calls) == 4:
            os.kill(victim or os.getpid(), signal.SIGKILL)
        return transfer(*args, **kwargs)

    mock.patch.object(MooncakeTransferEngine, "transfer", kill_and_transfer).start()
    mock.patch.object(remote_weights, "_BATCH_BYTES", 20_000).start()


def l3_hangs(rank: int) -> None:
    """No read of the rank from L3 ends. Its requests wait for it as long as their policy says."""
    if rank == FAULTY:
        forever = threading.Event().wait
        hanging = mock.Mock(side_effect=lambda *_, **__: forever())
        mock.patch.object(HiCacheFile, "batch_get_v2", hanging).start()


def steps_are_slow(rank: int) -> None:
    """The rank takes a tenth of a second for a step of two layers."""
    if rank != FAULTY:
        return
    forward = LlamaDecoderLayer.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return forward(*args, **kwargs)

    mock.patch.object(LlamaDecoderLayer, "forward", slow).start()

"""Real ranks on this machine: processes that meet, run a function, and give its results.

They are forked from a server that has torch imported, so that a rank starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import runpy
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from rigs.shared_processes import SharedProcess
from sglang.srt.distributed.parallel_state import (
    get_attention_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.distributed.rendezvous import Rendezvous, open_rendezvous
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.hardware_backend.device_runtime import device_runtime


class RankFailed(AssertionError):
    """A rank ended badly; the message has its traceback."""


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    attn_cp_size: int = 1,
    attn_dp_size: int = 1,
    device: str = "cpu",
    preload: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> list[Any]:
    """Run `work(*args)` on each rank of a server of `size` ranks, in their groups. Returns the
    results.

    Args:
        work: A function at the top of a file, which each rank loads again; its result can be sent.
        device: Kind of the ranks' devices. If there are several, each rank has its own.
        preload: Modules that ranks need and that take long to import. Only the first call of a
            process sets them.
        timeout_s: Within this time all ranks end.

    Raises:
        RankFailed: `work` raised on some rank, or a rank died or did not end in time. No rank is
            left.
    """
    multiprocessing.set_forkserver_preload(["rigs.schedulers.rank_processes", *preload])
    place = inspect.getfile(work), work.__name__
    ranks, readers = [], []
    with open_rendezvous(size) as meeting:
        for rank in range(size):
            reader, writer = multiprocessing.Pipe()
            arguments = (
                meeting.for_rank(rank),
                (attn_cp_size, attn_dp_size),
                device,
                writer,
                place,
                args,
            )
            process = SharedProcess(target=_rank, args=arguments)
            process.start()
            writer.close()
            ranks.append(process)
            readers.append(reader)
    try:
        return _results(readers, timeout_s)
    finally:
        for reader, process in zip(readers, ranks, strict=True):
            reader.close()
            process.kill()
            process.join()


def _results(readers: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Results in the order of ranks. A rank's traceback ends the wait: others may wait for that
    rank. A rank that is gone leaves the explanation to the others, if they notice."""
    deadline = time.monotonic() + timeout_s
    results: dict[Connection, Any] = {}
    gone: list[int] = []
    waited_for = list(readers)
    while waited_for:
        ready = wait(waited_for, max(0.0, deadline - time.monotonic()))
        for reader in [one for one in waited_for if one in ready]:
            rank = readers.index(reader)
            waited_for.remove(reader)
            try:
                is_good, results[reader] = reader.recv()
            except EOFError:
                gone.append(rank)
            else:
                if not is_good:
                    raise RankFailed(f"rank {rank}:\n{results[reader]}")
        if not ready:
            break
    if gone:
        raise RankFailed(f"ranks that died: {gone}")
    if waited_for:
        silent = [readers.index(reader) for reader in waited_for]
        raise RankFailed(f"ranks that have not ended after {timeout_s:.0f} s: {silent}")
    return [results[reader] for reader in readers]


def _rank(
    meeting: Rendezvous,
    sizes: tuple[int, int],
    device: str,
    writer: Connection,
    place: tuple[str, str],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    file, name = place
    try:
        kind = device_kind(device)
        if kind.has_symmetric_memory:
            device_runtime(device).set_device(meeting.rank)
        init_distributed_environment(kind.process_group, meeting)
        initialize_model_parallel(meeting.size, *sizes)
        if kind.has_symmetric_memory:
            own = torch.device(device, meeting.rank)
            get_attention_tp_group().open_symmetric_memory(own)
        writer.send((True, runpy.run_path(file)[name](*args)))
    except Exception:  # noqa: BLE001 - it is the parent's to raise
        writer.send((False, traceback.format_exc()))
    # Rank 0 has the store in which others may still be meeting.
    with contextlib.suppress(EOFError):
        writer.recv()
    # This does not wait for other ranks, unlike the end of a world.
    os._exit(0)

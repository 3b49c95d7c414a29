"""One model on several ranks in one process: each rank has a thread and a share of the model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from rigs.caches.memory_ranks import MemoryExchange, MemoryTensorGroup
from rigs.models.tiny_models import StepDriver
from sglang.srt.distributed.parallel_state import init_distributed_environment

T = TypeVar("T")


class RankThreads:
    """The ranks of one server, a thread for each, and their groups. Close it at the end.

    Args:
        size: Number of ranks.
        cp_size: Number of ranks over which the tokens of prefills are split; the others split
            layers.

    Attributes:
        ranks: Groups in which schedulers agree.
        tp_groups: For each rank, the group that splits layers with it.
        cp_groups: For each rank, the group that splits the tokens of prefills with it.
    """

    def __init__(self, size: int, cp_size: int) -> None:
        init_distributed_environment("gloo")
        tp_size = size // cp_size
        self.size = size
        self.ranks = MemoryExchange(size, attn_cp_size=cp_size)
        layers = [MemoryExchange(tp_size) for _ in range(cp_size)]
        contexts = [MemoryExchange(cp_size) for _ in range(tp_size)]
        self._exchanges = [self.ranks, *layers, *contexts]
        places = [divmod(rank, tp_size) for rank in range(size)]
        self.tp_groups = [MemoryTensorGroup(layers[cp], tp) for cp, tp in places]
        self.cp_groups = [MemoryTensorGroup(contexts[tp], cp) for cp, tp in places]
        self._pool = ThreadPoolExecutor(size)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(rank)` on all ranks at once; returns the results. The first error is raised,
        and no rank waits for one that has failed."""

        def on(rank: int) -> T:
            try:
                torch.set_num_threads(1)
                return work(rank)
            except BaseException as error:
                for exchange in self._exchanges:
                    exchange.fail(error)
                raise

        futures = [self._pool.submit(on, rank) for rank in range(self.size)]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def on_rank_threads(
    size: int,
    path: Path,
    work: Callable[[StepDriver, MemoryTensorGroup], T],
    *,
    cp_size: int = 1,
    make_driver: Callable[..., StepDriver] = StepDriver,
    **config: Any,
) -> list[T]:
    """Run `work` on each of `size` ranks of the model at `path`; returns the results.

    Args:
        work: Takes the rank's driver, and the group that it shares layers with.
        cp_size: See `RankThreads`.
        make_driver: Makes the driver from the path and `config`.
        config: See `StepDriver`.
    """
    threads = RankThreads(size, cp_size)

    def on(rank: int) -> T:
        tp_group, cp_group = threads.tp_groups[rank], threads.cp_groups[rank]
        return work(make_driver(path, tp_group=tp_group, cp_group=cp_group, **config), tp_group)

    try:
        return threads.run(on)
    finally:
        threads.close()

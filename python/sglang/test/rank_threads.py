"""One model on several ranks in one process: a thread, a runner and a share of it for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang.srt.distributed.parallel_state import init_distributed_environment
from sglang.test.memory_ranks import MemoryExchange, MemoryTensorGroup
from sglang.test.tiny_models import StepDriver

T = TypeVar("T")


def on_rank_threads(
    size: int,
    path: Path,
    work: Callable[[StepDriver, MemoryTensorGroup], T],
    *,
    cp_size: int = 1,
    **config: Any,
) -> list[T]:
    """What `work` gives on each of `size` ranks of the model at `path`.

    Args:
        work: Takes the rank's driver, and the group that it shares layers with.
        cp_size: Over how many of them the tokens of prefills are split; the others split layers.
        config: See `StepDriver`.
    """
    init_distributed_environment("gloo")
    tp_size = size // cp_size
    layers = [MemoryExchange(tp_size) for _ in range(cp_size)]
    contexts = [MemoryExchange(cp_size) for _ in range(tp_size)]

    def run(rank: int) -> T:
        try:
            torch.set_num_threads(1)
            cp_rank, tp_rank = divmod(rank, tp_size)
            tp_group = MemoryTensorGroup(layers[cp_rank], tp_rank)
            cp_group = MemoryTensorGroup(contexts[tp_rank], cp_rank)
            driver = StepDriver(path, tp_group=tp_group, cp_group=cp_group, **config)
            return work(driver, tp_group)
        except BaseException as error:
            for exchange in (*layers, *contexts):
                exchange.fail(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    return [future.result() for future in futures]

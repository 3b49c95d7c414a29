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
    size: int, path: Path, work: Callable[[StepDriver, MemoryTensorGroup], T], **config: Any
) -> list[T]:
    """What `work` gives on each rank of the model at `path`.

    Args:
        work: Takes the rank's driver, and the group that it shares layers with.
        config: See `StepDriver`.
    """
    init_distributed_environment("gloo")
    exchange = MemoryExchange(size)

    def run(rank: int) -> T:
        try:
            torch.set_num_threads(1)
            group = MemoryTensorGroup(exchange, rank)
            return work(StepDriver(path, tp_group=group, **config), group)
        except BaseException as error:
            exchange.fail(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    return [future.result() for future in futures]

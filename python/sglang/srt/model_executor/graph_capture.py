"""CUDA graphs: captured once, replayed often, whole or in pieces."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

_WARM_UP_RUNS: Final = 2

Graph: TypeAlias = torch.cuda.CUDAGraph


class GraphCapture:
    """Captures runs into one memory pool, so no two of them may be replayed at the same time.

    Capture the largest first: the others fit into what it took.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._started = time.monotonic()
        gc.collect()  # what dies while a graph is captured might be freed in it
        torch.cuda.synchronize()

    @property
    def seconds(self) -> float:
        """Since this was made."""
        return time.monotonic() - self._started

    def capture(self, run: Callable[[], object]) -> Graph:
        """One graph of all that `run` launches."""
        return self.capture_pieces(lambda cut: run())[0]

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[Graph]:
        """Graphs to be replayed one after the other.

        Args:
            run: Launches, and calls what it is given where the next graph is to begin. It is run
                a few times before: that compiles kernels and makes library handles, which cannot
                be captured.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                run(lambda: None)
            stream.synchronize()
            pieces = [self._begin()]

            def cut() -> None:
                pieces[-1].capture_end()
                pieces.append(self._begin())

            run(cut)
            pieces[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return pieces

    def _begin(self) -> Graph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

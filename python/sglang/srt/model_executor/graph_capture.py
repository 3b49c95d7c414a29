"""Capture of CUDA graphs, whole or in pieces."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, TypeVar

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention_kind import AttentionKind
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)

_WARM_UP_RUNS: Final = 2

Graph: TypeAlias = torch.cuda.CUDAGraph
S = TypeVar("S")
T = TypeVar("T")


class GraphCapture:
    """Captures graphs into one memory pool; no two of them may be replayed at the same time."""

    def __init__(self, *, show_progress: bool = False) -> None:
        self._show_progress = show_progress
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # an object that dies during a capture might be freed within it
        torch.cuda.synchronize()

    def capture_sizes(self, what: str, sizes: Sequence[S], capture: Callable[[S], T]) -> dict[S, T]:
        """Capture each size, and log the time. Returns the results by size.

        Args:
            what: Name of the steps for the log, such as "decoding of %s requests".
            sizes: Ascending.
        """
        started = time.monotonic()
        made = {}
        with progress_bar(
            logger.info,
            desc="Capturing graphs",
            total=len(sizes),
            disable=not self._show_progress,
        ) as progress:
            # The largest first: the others fit into its memory.
            for size in reversed(sizes):
                made[size] = capture(size)
                progress.update()
        named = what % ", ".join(map(str, sizes))
        logger.info("Captured %s, %.2f s", named, time.monotonic() - started)
        return made

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Capture one graph of all that `run` launches. Returns it with the result of `run`, whose
        tensors each replay overwrites."""
        (graph,), result = self.capture_pieces(lambda cut: run())
        return graph, result

    def capture_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[list[Graph], T]:
        """Capture graphs to be replayed one after the other; results as of `capture`.

        Args:
            run: Launches kernels, and calls its argument at the start of each further graph. It
                runs a few times before the capture, because compiling kernels and making library
                handles cannot be captured.
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

            result = run(cut)
            pieces[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return pieces, result

    def _begin(self) -> Graph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph


def uncaptured(
    backends: Iterable[tuple[AttentionKind, AttentionBackend]],
    captures: Callable[[AttentionBackend], bool],
) -> str:
    """Kinds whose backends keep a step from being captured, for the log; "" if none does.

    Args:
        captures: True if a backend lets the step be captured.
    """
    names = [
        f"{kind!r} by {type(backend).__name__}"
        for kind, backend in backends
        if not captures(backend)
    ]
    return ", ".join(names)

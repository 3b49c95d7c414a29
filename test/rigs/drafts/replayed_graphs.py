"""CUDA graphs on a CPU: a replay runs the captured function again, on the same static tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.mla_backend import MLATorchNativeBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.model_executor import cuda_graph_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative import verify_graphs
from sglang.srt.speculative.verify_graphs import VerifyGraphs

S = TypeVar("S")
T = TypeVar("T")


class ReplayedGraph:
    """Runs a function again, and writes its results to the tensors of the first run."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.result = run()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(_tensors(self.result), _tensors(self._run()), strict=True):
            old.copy_(new)


class ReplayedCapture:
    """In place of `GraphCapture`."""

    def __init__(self, *, show_progress: bool = False) -> None:
        del show_progress

    def capture_sizes(self, what: str, sizes: Sequence[S], capture: Callable[[S], T]) -> dict[S, T]:
        return {size: capture(size) for size in sizes}

    def capture(self, run: Callable[[], object]) -> tuple[ReplayedGraph, object]:
        graph = ReplayedGraph(run)
        return graph, graph.result


@contextmanager
def replayed_graphs() -> Iterator[None]:
    """Runners that are made inside capture decode steps and verifications. Prefills run as ever.

    Backends on a CPU plan by lists, which a graph on a GPU must not, so these are read from the
    static tensors.
    """
    real = VerifyGraphs._batch

    def batch_of(self: VerifyGraphs, size: int) -> ForwardBatch:
        batch = real(self, size)
        width = len(batch.out_cache_loc) // size
        batch.seq_lens_cpu = batch.seq_lens.tolist()
        batch.req_pool_indices_cpu = batch.req_pool_indices.tolist()
        batch.extend_prefix_lens_cpu = [length - width for length in batch.seq_lens_cpu]
        return batch

    patches: list[Any] = [
        mock.patch.object(ModelRunner, "_captures_graphs", True),
        mock.patch.object(ModelRunner, "_capture_prefills"),
        mock.patch.object(cuda_graph_runner, "GraphCapture", ReplayedCapture),
        mock.patch.object(verify_graphs, "GraphCapture", ReplayedCapture),
        mock.patch.object(VerifyGraphs, "_batch", batch_of),
    ]
    for backend in (TorchNativeAttnBackend, MLATorchNativeBackend):
        assert issubclass(backend, AttentionBackend)
        patches += [
            mock.patch.object(backend, "can_be_captured", True),
            mock.patch.object(backend, "captures_verify", True),
            mock.patch.object(
                backend,
                "init_forward_metadata_graph",
                lambda self, batch: self.init_forward_metadata(batch),
            ),
        ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _tensors(result: object) -> Iterator[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, VocabLogits):
        yield result.part
    elif isinstance(result, ForwardBatch):
        yield from (result.input_ids, result.positions)
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(result):
        for field in dataclasses.fields(result):
            yield from _tensors(getattr(result, field.name))

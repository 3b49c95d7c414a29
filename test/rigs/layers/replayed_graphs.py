"""Steps as graphs run them, without a GPU: a replay calls the captured function again, on the same
tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rigs.layers.quick_interpreter import quicken_interpreter
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.layers.attention.compressed_triton_backend import CompressedTritonBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.window_triton_backend import WindowTritonBackend
from sglang.srt.layers.attention_kind import COMPRESSED, FULL_ATTENTION, SLIDING_WINDOW
from sglang.srt.layers.triton_ops.attention import (
    decode_attention,
    extend_attention,
    latent_rows,
)
from sglang.srt.model_executor import cuda_graph_runner, extend_graph_runner, graph_capture
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner


class _Graph:
    def __init__(self, replay: Callable[[], Any]) -> None:
        self.replay = replay


class _Capture(graph_capture.GraphCapture):
    def __init__(self, *, show_progress: bool = False) -> None:
        self._show_progress = show_progress

    def capture_pieces(self, run: Callable[[Callable[[], None]], Any]) -> tuple[list[Any], Any]:
        """All of it is one piece."""
        result = run(lambda: None)
        return [_Graph(lambda: run(lambda: None))], result


def replayed_driver(patch: pytest.MonkeyPatch, path: Any, **settings: Any) -> StepDriver:
    """A driver of a model with windows or compressed rows. Steps of up to 4 requests are replayed,
    and prefills of up to 16 tokens. Kernels are interpreted, so contexts are not split."""
    quicken_interpreter()
    patch.setattr(latent_rows, "PROGRAMS", 1)
    patch.setattr(extend_attention, "PROGRAMS", 1)
    patch.setattr(decode_attention, "PROGRAMS", 1)
    patch.setattr(decode_attention, "LONG_SPLITS", (1, 1))
    for kind, make in (
        (FULL_ATTENTION, TritonAttnBackend),
        (SLIDING_WINDOW, WindowTritonBackend),
        (COMPRESSED, CompressedTritonBackend),
    ):
        key = kind, "triton", "cpu"
        patch.setitem(registry._BACKENDS, key, make)
        patch.setattr(registry, "_TAKE_SINKS", registry._TAKE_SINKS | {key})
    driver = StepDriver(path, attention_backend="triton", device="cpu", **settings)
    add_replays(patch, driver)
    return driver


def add_replays(patch: pytest.MonkeyPatch, driver: StepDriver) -> None:
    """Let a driver, whose backends can be captured, replay steps of up to 4 requests, and prefills
    of up to 16 tokens."""
    for module in (cuda_graph_runner, extend_graph_runner):
        patch.setattr(module, "GraphCapture", _Capture)
    patch.setattr(extend_graph_runner, "TOKEN_COUNTS", (16,))
    runner = driver.runner
    given = runner.model.forward, runner.attn_backends, runner.req_to_token_pool, runner.pools
    count = runner.num_logits
    runner._graphs += [
        CudaGraphRunner(*given, batch_sizes=[4], num_logits=count, show_progress=False),
        ExtendGraphRunner(*given, num_logits=count, show_progress=False),
    ]

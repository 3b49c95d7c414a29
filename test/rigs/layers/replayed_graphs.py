"""Steps as graphs run them, without a GPU: a replay calls the captured function again, on the same
tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rigs.layers.quick_interpreter import quicken_interpreter
from rigs.models.model_oracle import prompt, reference
from rigs.models.tiny_models import StepDriver
from rigs.models.triton_device import triton_device
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.layers.attention.compressed_triton_backend import CompressedTritonBackend
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.window_triton_backend import WindowTritonBackend
from sglang.srt.layers.attention_kind import COMPRESSED, FULL_ATTENTION, MLA, SLIDING_WINDOW
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.linear_attention.delta_layer import DeltaLayer
from sglang.srt.layers.linear_attention.mamba2 import Mamba2
from sglang.srt.layers.triton_ops.attention import (
    decode_attention,
    extend_attention,
    latent_rows,
)
from sglang.srt.model_executor import cuda_graph_runner, extend_graph_runner, graph_capture
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner


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


def replayed_driver(
    patch: pytest.MonkeyPatch, path: Any, counts: tuple[int, ...] = (16,), **settings: Any
) -> StepDriver:
    """A driver whose attention and recurrent layers run by kernels. Steps of up to 4 requests are
    replayed, and prefills of up to `counts` tokens. Kernels are interpreted, so contexts are not
    split."""
    quicken_interpreter()
    patch.setattr(latent_rows, "PROGRAMS", 1)
    patch.setattr(extend_attention, "PROGRAMS", 1)
    patch.setattr(decode_attention, "PROGRAMS", 1)
    patch.setattr(decode_attention, "LONG_SPLITS", (1, 1))
    for kind, make in (
        (FULL_ATTENTION, TritonAttnBackend),
        (SLIDING_WINDOW, WindowTritonBackend),
        (COMPRESSED, CompressedTritonBackend),
        (MLA, LatentTritonBackend),
    ):
        key = kind, "triton", "cpu"
        patch.setitem(registry._BACKENDS, key, make)
        patch.setattr(registry, "_TAKE_SINKS", registry._TAKE_SINKS | {key})
    driver = StepDriver(path, attention_backend="triton", device="cpu", **settings)
    for module in driver.runner.model.modules():
        if isinstance(module, DeltaLayer | Mamba2):
            module._kernels = KERNELS
    add_replays(patch, driver, counts)
    return driver


def driver_with_states(patch: pytest.MonkeyPatch, path: Path) -> StepDriver:
    """A driver with slots for snapshots: on the GPU if there is one, else with replays."""
    settings: dict[str, Any] = {"page_size": 16, "num_states": 20}
    if triton_device() == "cuda":
        return StepDriver(path, device="cuda", **settings)
    return replayed_driver(patch, path, max_requests=4, pool_tokens=1024, **settings)


def check_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to sums in another order."""
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


def assert_replayed_steps(
    hf: PreTrainedModel, driver: StepDriver, *, short: int, decodes: int
) -> None:
    """Compare steps of other sizes than those captured. A snapshot is taken amid a short prefill.

    Args:
        driver: Of `driver_with_states`; it has run nothing.
        short: Tokens of the prefill with the snapshot.
        decodes: Decode steps.
    """
    prompts = {row: prompt(60, row) for row in range(4)}
    wanted = {row: reference(hf, tokens) for row, tokens in prompts.items()}

    def extend(news: dict[int, int], track: dict[int, tuple[int, int]] | None = None) -> None:
        begins = {row: driver.lens[row] for row in news}
        work = [(row, prompts[row][begins[row] :][:new]) for row, new in news.items()]
        got = driver.extend(work, track).next_token_logits
        ends = [wanted[row][begins[row] + new - 1] for row, new in news.items()]
        check_logits(got, torch.stack(ends))

    extend({0: 40, 1: 3})  # longer than what is captured on a CPU
    extend({0: 5, 1: 9, 2: 1})
    extend({1: short}, {1: (18, 4)})
    driver.continue_from(18, 1, [3], 16)
    prompts[3], wanted[3] = prompts[1], wanted[1]
    for _ in range(decodes):
        rows = [0, 1, 2, 3][: driver.lens[0] % 2 + 3]
        ends = torch.stack([wanted[row][driver.lens[row]] for row in rows])
        work = [(row, prompts[row][driver.lens[row]]) for row in rows]
        check_logits(driver.decode(work).next_token_logits, ends)
    extend({3: 1})


def add_replays(
    patch: pytest.MonkeyPatch, driver: StepDriver, counts: tuple[int, ...] = (16,)
) -> None:
    """Let a driver, whose backends can be captured, replay steps of up to 4 requests, and prefills
    of up to `counts` tokens."""
    for module in (cuda_graph_runner, extend_graph_runner):
        patch.setattr(module, "GraphCapture", _Capture)
    patch.setattr(extend_graph_runner, "TOKEN_COUNTS", counts)
    runner = driver.runner
    given = runner.model.forward, runner.attn_backends, runner.req_to_token_pool, runner.pools
    count = runner.num_logits
    decoding = CudaGraphRunner(*given, batch_sizes=[4], num_logits=count, show_progress=False)
    runner._graphs.append(decoding)
    runner._capture_prefills()

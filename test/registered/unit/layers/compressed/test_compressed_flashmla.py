"""DeepSeek-V4's attention by FlashMLA's kernel against plain torch. Without a GPU the kernel's
definition is called in its place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=40, suite="base-b-test-1-gpu-large")

DEVICE: Final = triton_device()
ON_GPU: Final = DEVICE == "cuda"

from rigs.layers.compressed_cases import CompressedLayers, Work  # noqa: E402
from sglang.srt.layers.attention import (  # noqa: E402
    compressed_flashmla_backend,
    flashmla_library,
)
from sglang.srt.layers.attention.attention_registry import (  # noqa: E402
    create_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig  # noqa: E402
from sglang.srt.layers.attention.compressed_flashmla_backend import (  # noqa: E402
    CompressedFlashMLABackend,
)
from sglang.srt.layers.attention_kind import COMPRESSED  # noqa: E402
from sglang.srt.layers.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.mem_cache.device.state_spec import PoolName  # noqa: E402

IS_INSTALLED: Final = any(
    importlib.util.find_spec(library.package) for library in flashmla_library.LIBRARIES
)
TOLERANCE: Final = 5e-2 if ON_GPU else 1e-4
WINDOW, SPARSE = "sliding_attention", "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
SIZES: Final[dict[str, Any]] = {
    "num_attention_heads": 64, "head_dim": 512, "partial_rotary_factor": 1 / 8,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128, "index_topk": 40,
    "compress_rates": {SPARSE: 4, HEAVY: 128}, "max_position_embeddings": 4096,
}  # fmt: skip
"""Sizes that the kernel takes."""

pytestmark = pytest.mark.skipif(
    ON_GPU and not IS_INSTALLED, reason="needs sglang-kernel or sgl-flash-mla"
)


class Kernel:
    """In the kernel's place: its definition, token by token. On a GPU it compares the two."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        """Tokens, keys and width of lists of each call."""
        self._real = flashmla_library.load_kernel() if ON_GPU else None

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scaling: float,
        dim: int,
        sinks: torch.Tensor,
        lengths: None,
    ) -> list[torch.Tensor]:
        self.steps.append((len(q), len(kv), indices.shape[2]))
        assert q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()
        assert q.shape[2] == kv.shape[2] == dim and kv.shape[1] == 1
        assert indices.dtype == torch.int32 and indices.shape[:2] == (len(q), 1)
        assert indices.shape[2] % 128 == 0 and int(indices.max()) < len(kv)
        assert sinks.dtype == torch.float32 and sinks.is_contiguous()
        found = []
        for one, at in zip(q, indices[:, 0].long(), strict=True):
            assert len(at[at >= 0].unique()) == int((at >= 0).sum()), "no key is read twice"
            rows = kv[at[at >= 0], 0].float()
            scores = torch.cat((one.float() @ rows.t() * scaling, sinks[:, None]), dim=1)
            found.append((torch.softmax(scores, dim=1)[:, :-1] @ rows).to(q.dtype))
        want = torch.stack(found)
        if self._real is None:
            return [want]
        got = list(self._real(q, kv, indices, scaling, dim, sinks, lengths))
        torch.testing.assert_close(got[0], want, rtol=2e-2, atol=2e-2)
        return got


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    if not ON_GPU:
        from rigs.layers.quick_interpreter import quicken_interpreter

        quicken_interpreter()
    found = Kernel()
    monkeypatch.setattr(compressed_flashmla_backend, "load_kernel", lambda: found)
    monkeypatch.setattr(compressed_flashmla_backend, "_FEWEST_TOKENS", 20)
    return found


def make(path: Path, **settings: Any) -> CompressedLayers:
    sizes = {**SIZES, "page_size": 128, "length": 1024, "dtype": torch.bfloat16} if ON_GPU else {}
    return CompressedLayers(path, CompressedFlashMLABackend, DEVICE, **{**sizes, **settings})


def test_long_and_short_prompts_in_one_step(tmp_path: Path, kernel: Kernel) -> None:
    """Requests shorter than a group and longer than the window, chunks that begin within groups;
    steps of few tokens, and last tokens alone, are the other kernel's."""
    layers = make(tmp_path)
    assert layers.extend([Work(1, 3), Work(2, 1), Work(3, 70)]) < TOLERANCE
    num_calls = len(kernel.steps)
    assert num_calls == len(layers.model.decoder_layers)
    assert {tokens for tokens, _, _ in kernel.steps} == {74}
    assert layers.extend([Work(3, 5), Work(2, 9)]) < TOLERANCE
    assert layers.decode([2, 1, 3]) < TOLERANCE
    assert layers.extend([Work(4, 30)], last_only=True) < TOLERANCE
    assert len(kernel.steps) == num_calls
    assert layers.extend([Work(3, 13), Work(2, 5), Work(1, 37)]) < TOLERANCE
    assert len(kernel.steps) == 2 * num_calls
    assert layers.decode([1, 4, 3]) < TOLERANCE
    layers.check_pools(TOLERANCE)


def test_layers_with_a_window_alone(tmp_path: Path, kernel: Kernel) -> None:
    layers = make(tmp_path, layer_types=[WINDOW, HEAVY, SPARSE, HEAVY])
    assert layers.extend([Work(1, 50), Work(2, 41)]) < TOLERANCE
    assert layers.extend([Work(2, 20), Work(1, 3)]) < TOLERANCE
    assert len(kernel.steps) == 2 * 4


@pytest.mark.parametrize("bound", ["_ROWS_PER_TOKEN", "_COPY_BYTES"])
def test_too_many_rows_are_not_copied(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(compressed_flashmla_backend, bound, 0)
    layers = make(tmp_path, layer_types=[WINDOW, HEAVY, SPARSE, HEAVY])
    assert layers.extend([Work(1, 50), Work(2, 140)]) < TOLERANCE
    assert len(kernel.steps) == 1, "the layer with a window alone"


@pytest.mark.parametrize("way", ["init_forward_metadata", "init_forward_metadata_extend_graph"])
def test_the_plan_of_a_long_prefill_ends_with_it(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    layers = make(tmp_path)
    layers.extend([Work(1, 30)])
    backend: Any = layers.worlds[1].backend
    assert backend._plan is not None
    monkeypatch.setattr(CompressedFlashMLABackend.__base__, way, lambda *_: None)
    decode = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    getattr(backend, way)(decode, *([16, 1] if "graph" in way else []))
    assert backend._plan is None


@pytest.mark.parametrize("seed", range(2))
def test_random_steps(tmp_path: Path, kernel: Kernel, seed: int) -> None:
    """Requests that take snapshots, and begin anew from those of others."""
    layers = make(tmp_path)
    assert layers.walk(seed, 40 if ON_GPU else 9) < TOLERANCE
    assert kernel.steps
    layers.check_pools(TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "message"),
    [
        (
            32,
            512,
            torch.bfloat16,
            "a multiple of 64 heads on each rank, not 512 and 32: use triton",
        ),
        (64, 128, torch.bfloat16, "takes a head_dim of 512 .* not 128 and 64: use triton"),
        (64, 512, torch.float32, "takes --dtype bfloat16, not torch.float32: use triton"),
    ],
)
def test_other_models_are_refused(heads: int, dim: int, dtype: torch.dtype, message: str) -> None:
    ring: Any = SimpleNamespace(shape=(1, 128, dim))
    specs: Any = {PoolName.SWA: SimpleNamespace(buffers=(ring,))}
    config = AttentionConfig(
        num_heads=heads, specs=specs, page_size=256, dtype=dtype, device="cuda", has_sinks=True
    )
    with pytest.raises(ValueError, match=message):
        create_attention_backend("flashmla", config, COMPRESSED)


def test_a_gpu_that_does_not_run_the_kernel_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Only SM90a and SM100f are supported")

    monkeypatch.setattr(compressed_flashmla_backend, "load_kernel", lambda: refuse)
    ring: Any = SimpleNamespace(shape=(1, 128, 512))
    specs: Any = {PoolName.SWA: SimpleNamespace(buffers=(ring,))}
    config = AttentionConfig(
        num_heads=64, specs=specs, page_size=256, dtype=torch.bfloat16, device=DEVICE,
        has_sinks=True,
    )  # fmt: skip
    monkeypatch.setattr(CompressedFlashMLABackend.__base__, "warm_up", lambda *_: None)
    with pytest.raises(ValueError, match=r"does not run on .*Only SM90a.*: use triton"):
        CompressedFlashMLABackend(config).warm_up()

"""FlashMLA for many tokens of sparse attention: the kernel against the definition, the backend
against transformers. Without a GPU the backend calls the definition."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from rigs.models.model_oracle import prompt, reference
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

DEVICE: Final = triton_device()
ON_GPU: Final = DEVICE == "cuda"

from rigs.models.latent_driver import latent_driver  # noqa: E402
from sglang.srt.layers.attention import flashmla_backend, flashmla_library  # noqa: E402
from sglang.srt.layers.attention import latent_triton_backend as backend  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig  # noqa: E402
from sglang.srt.layers.attention.flashmla_backend import (  # noqa: E402
    FlashMLABackend,
    sparse_attention,
)

IS_INSTALLED: Final = any(
    importlib.util.find_spec(library.package) for library in flashmla_library.LIBRARIES
)
needs_kernel = pytest.mark.skipif(
    not (ON_GPU and IS_INSTALLED), reason="needs a GPU and sglang-kernel or sgl-flash-mla"
)
SIZES: Final[dict[str, Any]] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "index_topk": 128,
    "index_head_dim": 128, "max_position_embeddings": 1024, "v_head_dim": 16,
}  # fmt: skip
"""Sizes that the kernel takes."""


def defined(
    q: torch.Tensor,
    pool: torch.Tensor,
    chosen: torch.Tensor,
    scaling: float,
    rank: int,
    *none: None,
) -> list[torch.Tensor]:
    """The kernel's result by definition, token by token."""
    assert q.shape[1] % 64 == 0 and q.shape[2] == pool.shape[2] in (512, 576) and rank == 512
    assert none == (None, None)
    assert chosen.shape[1] == 1 and chosen.shape[2] % 128 == 0 and chosen.dtype == torch.int32
    found = []
    for one, slots in zip(q, chosen[:, 0].long(), strict=True):
        rows = pool[slots[slots >= 0], 0].to(one.dtype)
        weights = torch.softmax(one.float() @ rows.float().t() * scaling, dim=-1)
        found.append((weights @ rows[:, :rank].float()).to(q.dtype))
    return [torch.stack(found)]


class Kernel:
    """In the kernel's place: counts its calls, and on a GPU compares the kernel with the
    definition."""

    def __init__(self, real: flashmla_library.SparsePrefill | None) -> None:
        self.tokens: list[int] = []
        self._real = real

    def __call__(self, q: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        self.tokens.append(len(q))
        want = defined(q, *rest)
        if self._real is None:
            return want
        found = list(self._real(q, *rest))
        torch.testing.assert_close(found[0], want[0], rtol=2e-2, atol=2e-2)
        return found


@needs_kernel
@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize(("heads", "topk"), [(128, 2048), (64, 256), (64, 128)])
def test_the_kernel_equals_the_definition(heads: int, topk: int, width: int) -> None:
    kernel = flashmla_library.load_kernel()
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)

    query, pool = values(70, heads, width), values(4000, 1, width)
    chosen = torch.randint(0, 4000, (70, topk), generator=generator).int().to(DEVICE)
    chosen[3, 100:], chosen[5, 1:] = -1, -1
    (want,) = defined(query, pool, chosen.unsqueeze(1), 0.07, 512, None, None)
    got = sparse_attention(kernel, query, pool, chosen, 0.07)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def driver_with(kernel: Kernel, path: Path, monkeypatch: pytest.MonkeyPatch) -> StepDriver:
    """A driver of the checkpoint in `path`, whose backend calls `kernel`."""
    monkeypatch.setattr(flashmla_backend, "load_kernel", lambda: kernel)
    if not ON_GPU:
        return latent_driver(path, DEVICE, backend=FlashMLABackend)
    return StepDriver(
        str(path), page_size=16, device=DEVICE, dtype="bfloat16", disable_cuda_graph=True,
        attention_backend="flashmla",
    )  # fmt: skip


@pytest.mark.skipif(ON_GPU and not IS_INSTALLED, reason="needs sglang-kernel or sgl-flash-mla")
def test_long_prefills_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks before and after the first token that chooses, and one of few tokens; beside
    another request, and decode steps."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v32", **SIZES)
    monkeypatch.setattr(backend, "SHORT_TOKENS", 20)
    monkeypatch.setattr(backend, "MASKED_TOKENS", 5)
    monkeypatch.setattr(flashmla_backend, "MASKED_CONTEXT", 70)
    monkeypatch.setattr(flashmla_backend, "_FEWEST_BLOCKS", 16)
    long, short = prompt(240, 1), prompt(150, 2)
    kernel = Kernel(flashmla_library.load_kernel() if ON_GPU else None)
    driver = driver_with(kernel, tmp_path, monkeypatch)
    kernel.tokens.clear()
    found = logits(driver, long, short)
    # Calls of the first layer. In the second only each request's last token attends. Tokens before
    # 140 attend under a mask, since the model has few heads. The chunk of 10 is too small. In the
    # last chunk, of 18, some tokens see fewer than they would choose.
    assert kernel.tokens == [160 - 140, 40, 29, 18]
    if not ON_GPU:  # In bf16 the second layer's indexer chooses other tokens.
        of_long, of_short = reference(hf, long), reference(hf, short)
        rows = [of_short[139], *of_long[[159, 199, 209, 238, 239]], *of_short[[140, 119, 137]]]
        want = torch.stack(rows)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(ON_GPU and not IS_INSTALLED, reason="needs sglang-kernel or sgl-flash-mla")
def test_steps_of_many_requests_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step with contexts on both sides of the number of chosen rows."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v32", **SIZES)
    monkeypatch.setattr(flashmla_backend, "_FEWEST_BLOCKS", 3)
    kernel = Kernel(flashmla_library.load_kernel() if ON_GPU else None)
    driver = driver_with(kernel, tmp_path, monkeypatch)
    prompts = [prompt(length, length) for length in (30, 127, 160)]
    for row, tokens in enumerate(prompts):
        driver.extend([(row, tokens[:-1])])
    kernel.tokens.clear()
    found = driver.decode([(row, tokens[-1]) for row, tokens in enumerate(prompts)])
    assert kernel.tokens == [3, 3]
    if not ON_GPU:  # In bf16 the second layer's indexer chooses other tokens.
        want = torch.stack([reference(hf, tokens)[-1] for tokens in prompts])
        torch.testing.assert_close(found.next_token_logits.float(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(ON_GPU, reason="`test_glm5_next_cuda.py` runs the whole model")
def test_chosen_groups_and_open_ones_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-5.3-Flash: chunks that end at the edges of groups beside another request, then steps."""
    from rigs.layers.pooled_driver import pooled_driver
    from rigs.layers.quick_interpreter import quicken_interpreter

    quicken_interpreter()
    hf = save_tiny_checkpoint(tmp_path, "glm5_next", max_position_embeddings=512, kv_lora_rank=512)
    monkeypatch.setattr(flashmla_backend, "_FEWEST_BLOCKS", 10)
    kernel = Kernel(None)
    monkeypatch.setattr(flashmla_backend, "load_kernel", lambda: kernel)
    driver = pooled_driver(tmp_path, by_kernels=True, backend=FlashMLABackend)
    tokens, other = prompt(100, 1), prompt(50, 2)
    want, want_other = reference(hf, tokens), reference(hf, other)
    edges = [0, 15, 16, 31, 63, 64, 81, 97]
    for nth, (begin, end) in enumerate(itertools.pairwise(edges)):
        rows, wanted = [(1, tokens[begin:end])], [want[end - 1]]
        if nth < 4:
            rows.insert(0, (0, other[10 * nth : 10 * nth + 10]))
            wanted.insert(0, want_other[10 * nth + 9])
        got = driver.extend(rows).next_token_logits
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-3, atol=1e-3)
    assert kernel.tokens and max(kernel.tokens) > 20
    monkeypatch.setattr(flashmla_backend, "_FEWEST_BLOCKS", 2)
    kernel.tokens.clear()
    for step in range(2):
        got = driver.decode([(1, tokens[97 + step]), (0, other[40 + step])]).next_token_logits
        wanted = [want[97 + step], want_other[40 + step]]
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-3, atol=1e-3)
    assert set(kernel.tokens) == {2}


def logits(driver: StepDriver, long: list[int], short: list[int]) -> torch.Tensor:
    """Logits of prefills and a decode step, fp32 on the CPU."""
    found = [driver.extend([(0, short[:140]), (1, long[:160])]).next_token_logits.clone()]
    for begin, end in ((160, 200), (200, 210), (210, 239)):
        found.append(driver.extend([(1, long[begin:end])]).next_token_logits.clone())
    found.append(driver.decode([(1, long[239]), (0, short[140])]).next_token_logits.clone())
    for begin, end in ((0, 120), (120, 138)):
        found.append(driver.extend([(2, short[begin:end])]).next_token_logits.clone())
    return torch.cat(found).float().cpu()


def test_a_gpu_that_does_not_run_the_kernel_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Only SM90a and SM100f are supported")

    monkeypatch.setattr(flashmla_backend, "load_kernel", lambda: refuse)
    monkeypatch.setattr(backend, "warm_up_projected", lambda *_: None)
    monkeypatch.setattr(backend, "warm_up_latent_joins", lambda *_: None)
    mla = SimpleNamespace(qk_head_dim=192, v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
    config = AttentionConfig(
        num_heads=6, specs={}, page_size=16, dtype=torch.bfloat16, device="cpu",
        mla=mla,  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"does not run on 'cpu' .Only SM90a.*: use triton"):
        FlashMLABackend(config).warm_up()

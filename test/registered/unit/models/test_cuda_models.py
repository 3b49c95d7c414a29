"""Models on a GPU: logits equal transformers' on the CPU, with graphs and without."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import pytest
import torch

from rigs.models.model_oracle import logits_of_batches, prompt, reference
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.linear_attention import delta_layer, mamba2
from sglang.srt.layers.linear_attention.extend_plan import SHORT
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
WIDER: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 128}
ODD_DELTA: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
ODD_HEADS: dict[str, dict[str, Any]] = {
    "glm5_next": {},
    "kimi_linear": {},
    "nemotron_h": {"mamba_head_dim": 24, "ssm_state_size": 20},
    "qwen3_5": ODD_DELTA,
    "qwen3_next": ODD_DELTA,
}
"""Heads that the kernels for chunks do not take."""
NEEDS_FLASHINFER = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)


@pytest.mark.parametrize("backend", ["triton", "torch_native"])
@pytest.mark.parametrize("disable_cuda_graph", [True, False])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3", WIDE)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_transformers(
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    page_size: int,
    disable_cuda_graph: bool,
    backend: str,
    dtype: torch.dtype,
) -> None:
    check_logits(tmp_path, family, overrides, page_size, disable_cuda_graph, backend, dtype)


@NEEDS_FLASHINFER
@pytest.mark.parametrize("disable_cuda_graph", [True, False])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_logits_by_flashinfer_equal_transformers(
    tmp_path: Path, kv_heads: int, page_size: int, disable_cuda_graph: bool
) -> None:
    """For models that flashinfer takes: 2-byte values, heads of 128."""
    shape = WIDER | {"num_key_value_heads": kv_heads}
    check_logits(
        tmp_path, "qwen3", shape, page_size, disable_cuda_graph, "flashinfer", torch.bfloat16
    )


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_moe", {}),
        ("minimax_m2", {}),
        ("minimax_m2", {"rope_parameters": {"rope_theta": 500.0}}),
    ],
)
@pytest.mark.parametrize("disable_cuda_graph", [True, False])
def test_logits_of_experts_equal_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], disable_cuda_graph: bool
) -> None:
    """In fp32, because rounding to 2 bytes may choose another expert."""
    check_logits(tmp_path, family, overrides, 64, disable_cuda_graph, "triton", torch.float32)


@pytest.mark.parametrize("disable_cuda_graph", [True, False])
@pytest.mark.parametrize(
    "family", ["glm5_next", "kimi_linear", "qwen3_next", "qwen3_5", "nemotron_h"]
)
def test_logits_of_hybrids_equal_those_of_a_cpu(
    tmp_path: Path, family: str, disable_cuda_graph: bool
) -> None:
    """Short prefills, from nothing and from a state, and decoding: by kernels for few tokens.

    Not transformers', which computes on GPUs alone where flash-linear-attention is installed.
    """
    save_tiny_checkpoint(tmp_path, family)
    want = logits_of_batches(StepDriver(tmp_path, page_size=16))
    driver = StepDriver(
        tmp_path, page_size=16, device="cuda", disable_cuda_graph=disable_cuda_graph
    )
    torch.testing.assert_close(logits_of_batches(driver), want, rtol=1e-3, atol=1e-3)


MAMBA: Final[dict[str, Any]] = {"mamba_head_dim": 32, "ssm_state_size": 64}
KDA: Final[dict[str, Any]] = {
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 2,
        "short_conv_kernel_size": 4,
    }
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(("nemotron_h", {**MAMBA, "chunk_size": chunk}) for chunk in (64, 128)),
        ("kimi_linear", KDA),
    ],
)
def test_long_prefills_of_hybrids_equal_those_of_a_cpu(
    tmp_path: Path, family: str, shape: dict[str, Any]
) -> None:
    """The kernels for chunks compute them, from nothing and from a state."""
    save_tiny_checkpoint(tmp_path, family, **shape)
    tokens, found = prompt(460, 3), []
    for device in ("cpu", "cuda"):
        driver = StepDriver(tmp_path, page_size=16, device=device, num_states=20)
        steps = [driver.extend([(0, tokens[:300])], {0: (18, 256)})]
        driver.continue_from(18, 0, [1], 256)
        steps.append(driver.extend([(1, tokens[256:]), (0, tokens[300:])]))
        found.append(torch.cat([step.next_token_logits.cpu() for step in steps]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("qwen3_next", delta_layer),
        ("kimi_linear", delta_layer),
        ("glm5_next", delta_layer),
        ("nemotron_h", mamba2),
    ],
)
def test_captured_short_prefills_keep_recurrent_states(
    tmp_path: Path, family: str, layer: ModuleType, dtype: str
) -> None:
    """Logits, running states and snapshots are those of steps without graphs.

    In fp32 those are computed in torch, as long prefills of odd heads are. In bf16, where another
    order of sums may choose another expert, by the same kernels, and no step is padded.
    """
    is_exact = dtype == "float32"
    steps = ([40, 3, 1], [1, 64, 2], [17, 90, 100])
    if not is_exact:
        steps = ([40, 20, 4], [1, 14, 1], [17, 90, 149])
    tracked = ({0: (20, 32), 2: (21, 1)}, None, {1: (22, 64)})
    save_tiny_checkpoint(tmp_path, family, **ODD_HEADS[family])
    found = []
    for disable in (True, False):
        driver = StepDriver(
            tmp_path, page_size=16, device="cuda", dtype=dtype, num_states=24,
            disable_cuda_graph=disable,
        )  # fmt: skip
        pool = driver.runner.pools[PoolName.MAMBA]
        assert isinstance(pool, MambaPool)
        logits = []
        with mock.patch.object(layer, "SHORT", 0 if disable and is_exact else SHORT):
            for new, snapshots in zip(steps, tracked, strict=True):
                work = [(row, prompt(count, row + count)) for row, count in enumerate(new)]
                output = driver.extend(work, snapshots)
                logits.append(output.next_token_logits.cpu().clone())
        slots = driver.runner.req_to_token_pool.state_slots(torch.arange(3, device="cuda"))
        assert slots is not None
        kept = [*slots.tolist(), 20, 21, 22]
        states = [pool.temporal[:, kept].float().cpu(), pool.conv[:, kept].float().cpu()]
        found.append([torch.stack(logits), *states])
        assert states[0][:, 3:].abs().amax(dim=(0, 2, 3, 4)).min() > 0
        assert pool.temporal.isfinite().all() and pool.conv.isfinite().all()
    for graphed, eager in zip(found[1], found[0], strict=True):
        assert (graphed - eager).norm() < (1e-4 if is_exact else 3e-2) * eager.norm()


@pytest.mark.parametrize(
    "family", ["glm5_next", "kimi_linear", "qwen3_next", "qwen3_5", "nemotron_h"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_decoding_keeps_recurrent_states(tmp_path: Path, family: str, dtype: str) -> None:
    """Logits, running states and snapshots are those of steps without graphs, padded or not."""
    save_tiny_checkpoint(tmp_path, family, **ODD_HEADS[family])
    found = []
    for disable in (True, False):
        driver = StepDriver(
            tmp_path, page_size=16, device="cuda", dtype=dtype, num_states=24,
            disable_cuda_graph=disable,
        )  # fmt: skip
        assert len(driver.runner._graphs) == (0 if disable else 2)
        pool = driver.runner.pools[PoolName.MAMBA]
        assert isinstance(pool, MambaPool)
        # The batch has a captured size: without padding, the kernels are the same.
        driver.extend([(row, prompt(length, row)) for row, length in enumerate((20, 21, 23))])
        logits = []
        for step in range(6):
            snapshots = {0: (20, 0), 2: (21, 0)} if step == 3 else None
            output = driver.decode([(row, 5 + step) for row in range(3)], snapshots)
            logits.append(output.next_token_logits.cpu().clone())
        slots = driver.runner.req_to_token_pool.state_slots(torch.arange(3, device="cuda"))
        assert slots is not None
        kept = [*slots.tolist(), 20, 21]
        states = [pool.temporal[:, kept].float().cpu(), pool.conv[:, kept].float().cpu()]
        found.append([torch.stack(logits), *states])
        assert states[0][:, 3].abs().max() > 0
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for graphed, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(graphed, eager, rtol=tolerance, atol=tolerance)


def check_logits(
    directory: Path,
    family: str,
    overrides: dict[str, Any],
    page_size: int,
    disable_cuda_graph: bool,
    backend: str,
    dtype: torch.dtype,
) -> None:
    hf = save_tiny_checkpoint(directory, family, dtype=dtype, **overrides)
    driver = StepDriver(
        directory,
        page_size=page_size,
        device="cuda",
        disable_cuda_graph=disable_cuda_graph,
        attention_backend=backend,
    )
    long, short = prompt(90, 1), prompt(21, 2)
    want_long, want_short = reference(hf, long), reference(hf, short)
    # In bf16 transformers' logits are up to 0.026 from those in fp32. Two roundings add up.
    bound = 1e-4 if dtype is torch.float32 else 4e-2

    def check(got: torch.Tensor, *want: torch.Tensor) -> None:
        wanted = torch.stack(want)
        error = (got.cpu() - wanted).norm() / wanted.norm()
        assert error < bound, float(error)

    check(
        driver.extend([(0, short[:17]), (1, long[:37])]).next_token_logits,
        want_short[16],
        want_long[36],
    )
    check(driver.extend([(1, long[37:86])]).next_token_logits, want_long[85])
    for i in range(4):
        got = driver.decode([(1, long[86 + i]), (0, short[17 + i])]).next_token_logits
        check(got, want_long[86 + i], want_short[17 + i])


@pytest.mark.parametrize("backend", ["triton", pytest.param("flashinfer", marks=NEEDS_FLASHINFER)])
def test_graphs_give_what_launches_give_at_every_batch_size(tmp_path: Path, backend: str) -> None:
    """Bit for bit where the batch is a captured size, and near it where it is padded.

    flashinfer splits contexts in graphs alone: only near it.
    """
    save_tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDER)
    drivers = [
        StepDriver(
            tmp_path,
            page_size=16,
            device="cuda",
            disable_cuda_graph=off,
            attention_backend=backend,
        )
        for off in (False, True)
    ]
    prompts = [prompt(20 + 7 * row, row) for row in range(13)]
    for driver in drivers:
        driver.extend(list(enumerate(prompts)))
    for count in (1, 2, 3, 8, 13, 5, 1):
        work = [(row, 11 + row) for row in range(count)]
        got, want = (driver.decode(work).next_token_logits.clone() for driver in drivers)
        assert (got - want).abs().max() < 0.03 * want.abs().max()
        if count in (1, 2, 8) and backend == "triton":
            assert torch.equal(got, want)


def test_short_prefills_in_graphs_give_what_launches_give(tmp_path: Path) -> None:
    """Holds at every captured number of tokens and beside it, for one request and several."""
    shape = WIDER | {"max_position_embeddings": 2048}
    save_tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **shape)
    drivers = [
        StepDriver(tmp_path, page_size=16, device="cuda", disable_cuda_graph=off)
        for off in (False, True)
    ]
    replayed = []
    replay = ExtendGraphRunner.replay

    def count(runner: ExtendGraphRunner, batch: ForwardBatch) -> LogitsProcessorOutput:
        replayed.append(len(batch.input_ids))
        return replay(runner, batch)

    with mock.patch.object(ExtendGraphRunner, "replay", count):
        for new in (
            [20, 1, 3],
            [300],
            [1],
            [16],
            [17],
            [64, 64, 1, 1, 30, 2, 3, 4],
            [256],
            [255, 2],
        ):
            work = [(row, prompt(count, row + count)) for row, count in enumerate(new)]
            got, want = (driver.extend(work).next_token_logits.clone() for driver in drivers)
            assert got.shape == want.shape
            assert (got - want).abs().max() < 0.03 * want.abs().max(), new
    assert replayed == [24, 1, 16, 17, 169, 256]
    last = [(0, 3), (1, 4)]
    got, want = (driver.decode(last).next_token_logits.clone() for driver in drivers)
    assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize("new", [[(row, [5]) for row in range(3)], [(0, [7] * 20), (2, [8] * 3)]])
def test_padding_writes_to_nobodys_slots(tmp_path: Path, new: list[tuple[int, list[int]]]) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    driver = StepDriver(tmp_path, page_size=16, device="cuda")
    driver.extend([(row, prompt(20, row)) for row in range(3)])
    pool = driver.runner.token_to_kv_pool
    buffers = [buffer for layer in pool.spec.layers for buffer in pool.get_kv_buffer(layer)]
    before = [buffer.clone() for buffer in buffers]
    if len(new) == 3:
        driver.decode([(row, tokens[0]) for row, tokens in new])  # padded to 4
    else:
        driver.extend(new)  # padded to 32
    for old, now in zip(before, buffers, strict=True):
        assert now.isfinite().all()
        changed = (old != now).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert len([slot for slot in changed if slot >= 16]) == sum(len(ids) for _, ids in new)


def test_fp8_cache_follows_the_full_one(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **WIDE)
    logits = []
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        driver = StepDriver(tmp_path, device="cuda", kv_cache_dtype=kv_cache_dtype)
        driver.extend([(0, prompt(60, 1))])
        driver.extend([(0, prompt(20, 2))])
        logits.append(driver.decode([(0, 7)]).next_token_logits)
    assert driver.runner.kv_bytes_per_token() == 2 * 2 * 64 * 2
    assert (logits[1] - logits[0]).norm() < 0.1 * logits[0].norm()
    assert not torch.equal(logits[0], logits[1])


def test_captured_steps_wait_for_a_load_in_flight(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    driver = StepDriver(tmp_path, device="cuda")
    driver.extend([(0, prompt(20, 1))])
    waited: list[int] = []

    class Counter:
        def set_consumer(self, index: int) -> None: ...

        def wait_until(self, threshold: int) -> None:
            waited.append(threshold)

    driver.runner.token_to_kv_pool.register_layer_transfer_counter(Counter())
    driver.decode([(0, 5)])
    assert waited == [1]
    waited.clear()
    driver.extend([(0, prompt(20, 2))])
    assert waited == [0, 1]  # layer by layer, though it is captured


def test_weights_are_equal_to_the_cpus(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    config = ModelConfig.from_path(str(tmp_path))
    models = [
        ModelRunner(
            ModelRunnerConfig(
                model_config=config, device=device, load_format="dummy", show_progress=False
            )
        ).model
        for device in ("cpu", "cuda")
    ]
    on_gpu = dict(models[1].weight_slots())
    for name, slot in models[0].weight_slots():
        assert torch.equal(slot.dest, on_gpu[name].dest.cpu())

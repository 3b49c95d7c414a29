"""ModelRunner: pools, refusals, and the order of storing, loading and reading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.layers.forward_batch_info import compute_extend_positions
from sglang.srt.mem_cache.device.row_pool import RowSpec
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName, StateBuffer, StateSpec
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig, check_groups
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_checkpoint(tmp_path, "qwen3")
    return tmp_path


def make_runner(checkpoint: Path, **fields: Any) -> ModelRunner:
    config = ModelConfig.from_path(str(checkpoint))
    return ModelRunner(ModelRunnerConfig(model_config=config, show_progress=False, **fields))


def test_pools_have_the_sizes_that_were_asked_for(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, page_size=16)
    runner.init_memory_pool(256, 3)
    assert runner.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, dims, fp32
    assert runner.token_to_kv_pool_allocator.available_size() == 256
    assert runner.req_to_token_pool.req_to_token.shape == (3 + 1, 512)
    assert sum(runner.token_to_kv_pool.get_kv_size_bytes()) == (256 + 16) * 512
    assert runner.weight_bytes() == sum(p.numel() * 4 for p in runner.model.parameters())


def test_pools_are_made_in_the_memory_that_is_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Memory:
        @contextlib.contextmanager
        def use(self) -> Iterator[None]:
            calls.append("begin")
            yield
            calls.append("end")

    make: Any = vars(model_runner)["make_pools"]

    def made(*args: Any) -> Any:
        calls.append("pools")
        return make(*args)

    monkeypatch.setattr(model_runner, "init_mooncake_custom_mem_pool", lambda device: Memory())
    monkeypatch.setattr(model_runner, "make_pools", made)
    make_runner(checkpoint, page_size=16).init_memory_pool(256, 3)
    assert calls == ["begin", "pools", "end"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype 'fp8_e5m2' is not supported here"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a CPU keeps only latent rows .* 'kv' per head; use"),
        ({"attention_backend": "flashinfer"}, "attention backend 'flashinfer'"),
        ({"load_format": "remote_instance"}, "'remote_instance' needs a seed"),
        ({"load_format": "gguf"}, "load format 'gguf' is not supported"),
    ],
)
def test_settings_are_refused(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_runner(checkpoint, **fields)


def test_a_device_is_prepared_before_anything_is_made_on_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            order.append(name)
            return call(*args)

        return note

    monkeypatch.setattr(CpuRuntime, "prepare", noted("prepare", lambda _: None))
    for name in ("build_model", "create_attention_backends", "load_weights"):
        monkeypatch.setattr(model_runner, name, noted(name, getattr(model_runner, name)))
    make_runner(checkpoint)
    assert order == ["prepare", "build_model", "create_attention_backends", "load_weights"]


def test_pool_that_is_not_whole_pages_is_refused(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, page_size=16)
    for tokens in (0, 8, 100):
        with pytest.raises(ValueError, match=f"max_total_tokens={tokens}"):
            runner.init_memory_pool(tokens, 1)


class RecordingCounter:
    """Stands for a load in flight: notes when the model waits for which layer."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def set_consumer(self, index: int) -> None:
        raise AssertionError("the runner does not choose the load")

    def wait_until(self, threshold: int) -> None:
        self.events.append(f"wait {threshold}")


def test_each_layer_stores_first_and_waits_only_for_itself(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StepDriver(checkpoint)
    pool = driver.runner.token_to_kv_pool
    events: list[str] = []
    store = pool.set_kv_buffer

    def recorded(layer: Any, *args: torch.Tensor) -> None:
        events.append(f"store {layer.layer_id}")
        store(layer, *args)

    monkeypatch.setattr(pool, "set_kv_buffer", recorded)
    pool.register_layer_transfer_counter(RecordingCounter(events))
    driver.extend([(0, [1, 2, 3])])
    driver.extend([(0, [4, 5])])
    driver.decode([(0, 6)])
    assert events == ["store 0", "wait 0", "store 1", "wait 1"] * 3


def test_decoding_greedily_goes_on_as_prefill_would(checkpoint: Path) -> None:
    """Ten tokens one by one equal the same ten prefilled at once on a fresh engine."""
    one_by_one = StepDriver(checkpoint, page_size=16)
    tokens = [5, 9, 13]
    logits = one_by_one.extend([(0, tokens)]).next_token_logits
    for _ in range(10):
        tokens.append(int(logits[0].argmax()))
        logits = one_by_one.decode([(0, tokens[-1])]).next_token_logits
    at_once = StepDriver(checkpoint, page_size=1).extend([(0, tokens)]).next_token_logits
    torch.testing.assert_close(logits, at_once, rtol=1e-4, atol=1e-4)


def test_positions_continue_each_prefix() -> None:
    assert compute_extend_positions([0, 5], [2, 3], "cpu").tolist() == [0, 1, 5, 6, 7]
    assert compute_extend_positions([], [], "cpu").tolist() == []


@pytest.mark.parametrize(
    ("fields", "cp_size", "message"),
    [
        ({"num_draft_tokens": 2}, 1, "--speculative-algorithm: state 'open_group' of Qwen3For"),
        ({}, 2, "--attn-cp-size 2: .* Qwen3ForCausalLM, whose state 'kv' groups tokens"),
    ],
)
def test_groups_of_tokens_refuse_drafts_and_split_prefills(
    fields: dict[str, Any], cp_size: int, message: str
) -> None:
    model = ModelConfig.from_path(str(BUILTIN_MODEL_DIR))
    rows = RowSpec.of((0,), 4, torch.float32, stride=4)
    buffers = (StateBuffer("group", (2,), torch.float32),)
    own = StateSpec(name=PoolName.OPEN_GROUP, layers=(0,), buffers=buffers, item=ItemKind.REQUEST)
    with pytest.raises(ValueError, match=message):
        check_groups(ModelRunnerConfig(model_config=model, **fields), (rows, own), cp_size)
    check_groups(ModelRunnerConfig(model_config=model), (rows, own), 1)

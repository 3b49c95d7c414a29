"""A model whose layers attend in two ways and keep two kinds of state, in one forward.

The second kind is uniform attention: a token sees the mean of all values up to itself, so values
are all that it keeps. Ordinary attention does the same where its queries are zeros, which makes
transformers' own llama the oracle.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM as HfLlama

from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.attention_registry import (
    create_attention_backends,
    default_attention_backend,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention_kind import FULL_ATTENTION, SLIDING_WINDOW, AttentionKind
from sglang.srt.layers.forward_batch_info import AttentionInputs, AttentionLayer, ForwardBatch
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.triton_ops.arguments import RoundedRows
from sglang.srt.mem_cache.device import pool_registry
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.pool_registry import register_pool
from sglang.srt.mem_cache.device.state_spec import KVSpec, PoolName, StateBuffer, StateSpec
from sglang.srt.model_executor.graph_capture import uncaptured
from sglang.srt.model_loader import loader
from sglang.srt.models.llama import LayerSpec, LlamaAttention, LlamaForCausalLM, LlamaModel
from sglang.srt.models.registry import MODEL_CLASSES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

UNIFORM = AttentionKind("uniform")
UNIFORM_LAYERS = (1, 2)
LAYERS = 4


class ValueSpec(StateSpec):
    """Values alone, in the slots of the keys and values of the other layers."""


class ValuePool(BaseDevicePool):
    """`[size + page_size, heads, head_dim]` for each layer."""

    def __init__(
        self, spec: ValueSpec, size: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(spec, size, device)
        (values,) = spec.buffers
        self.buffers = [
            torch.zeros(size + page_size, *values.shape, dtype=values.dtype) for _ in spec.layers
        ]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        raise NotImplementedError("nothing here copies pages")


class UniformBackend(AttentionBackend):
    """Means over the contexts that the table of slots names."""

    def __init__(self, config: AttentionConfig) -> None:
        self.group = config.num_heads // config.specs[PoolName.INDEXER].buffers[0].shape[0]
        self.num_planned = 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.num_planned += 1

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert inputs.rows is None, "no uniform layer is the last"
        news = forward_batch.extend_seq_lens_cpu
        assert news is not None
        return torch.cat(
            [
                self._mean(forward_batch, layer, request, length - new + 1 + i)
                for request, (length, new) in enumerate(
                    zip(forward_batch.seq_lens_cpu, news, strict=True)
                )
                for i in range(new)
            ]
        )

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        lens = forward_batch.seq_lens_cpu
        return torch.cat(
            [self._mean(forward_batch, layer, i, length) for i, length in enumerate(lens)]
        )

    def _mean(
        self, batch: ForwardBatch, layer: AttentionLayer, request: int, length: int
    ) -> torch.Tensor:
        assert batch.pools is not None
        pool = batch.pools[PoolName.INDEXER]
        assert isinstance(pool, ValuePool)
        values = pool.buffers[pool.wait_for_layer(layer.layer_id)]
        row = batch.req_pool_indices[request]
        slots = batch.req_to_token_pool.req_to_token[row, :length]
        return values[slots].mean(0).repeat_interleave(self.group, 0).reshape(1, -1)


class UniformAttention(LlamaAttention):
    """Has llama's weights and asks neither queries nor keys."""

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        _, forward_batch, rows = step
        qkv = self.qkv_proj.forward(x).view(len(x), -1, self.head_dim)
        v = qkv[:, -self.attn.num_kv_heads :]
        assert forward_batch.pools is not None
        pool = forward_batch.pools[PoolName.INDEXER]
        assert isinstance(pool, ValuePool)
        values = pool.buffers[pool.spec.layers.index(self.attn.layer_id)]
        values[forward_batch.out_cache_loc] = v
        attended = self.attn.forward(v, v, v, forward_batch, save_kv_cache=False, rows=rows)
        return self.o_proj.forward(attended, residual)


class MixedForCausalLM(LlamaForCausalLM):
    """Llama with uniform attention in two of its layers."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        for i in UNIFORM_LAYERS:
            place = placement.at(f"model.layers.{i}")
            layer = LayerSpec(config, self.decoder_options(config), place, i)
            attention = UniformAttention(layer)
            attention.attn.kind = UNIFORM
            assert isinstance(self.model, LlamaModel)
            self.model.decoder_layers[i].self_attn = attention

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        first = next(self.attention_layers())
        heads, dim = first.num_kv_heads, first.head_dim
        full = tuple(i for i in range(LAYERS) if i not in UNIFORM_LAYERS)
        values = ValueSpec(
            name=PoolName.INDEXER,
            layers=UNIFORM_LAYERS,
            buffers=(StateBuffer("v", (heads, dim), kv_dtype),),
            indices_from_pool=PoolName.KV,
        )
        return (KVSpec.of_heads(full, heads, dim, kv_dtype), values)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_registry, "_POOLS", dict(pool_registry._POOLS))
    monkeypatch.setattr(attention_registry, "_BACKENDS", dict(attention_registry._BACKENDS))
    classes = {**MODEL_CLASSES, "LlamaForCausalLM": MixedForCausalLM}
    monkeypatch.setattr(loader, "MODEL_CLASSES", MappingProxyType(classes))
    register_pool(ValueSpec, ValuePool)
    register_attention_backend(UNIFORM, "by_definition", "cpu", UniformBackend)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=LAYERS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for i in UNIFORM_LAYERS:
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path


def test_both_kinds_run_in_one_forward(checkpoint: Path) -> None:
    driver = StepDriver(checkpoint, page_size=4)
    hf = HfLlama.from_pretrained(str(checkpoint))
    contexts = [[5, 9, 13, 2, 8, 1], [7, 3]]
    logits = driver.extend(list(enumerate(contexts))).next_token_logits
    more = [[11, 4], [6]]
    for step in range(4):
        with torch.no_grad():
            want = torch.cat([hf(torch.tensor([context])).logits[:, -1] for context in contexts])
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        if step == 0:  # a prefix that the pools hold
            contexts = [old + new for old, new in zip(contexts, more, strict=True)]
            logits = driver.extend(list(enumerate(more))).next_token_logits
            continue
        words = want.argmax(-1).tolist()
        contexts = [[*old, word] for old, word in zip(contexts, words, strict=True)]
        logits = driver.decode(list(enumerate(words))).next_token_logits


def test_each_kind_of_state_has_its_pool_and_its_share_of_the_size(checkpoint: Path) -> None:
    runner = StepDriver(checkpoint, page_size=4).runner
    assert {name: pool.spec.layers for name, pool in runner.pools.items()} == {
        PoolName.KV: (0, 3),
        PoolName.INDEXER: UNIFORM_LAYERS,
    }
    assert runner.token_to_kv_pool is runner.pools[PoolName.KV]
    value_bytes = 2 * 16 * 4  # heads, dims, fp32
    assert runner.kv_bytes_per_token() == 2 * 2 * value_bytes + 2 * value_bytes


def test_each_kind_has_its_backend_and_plans_a_batch_once(checkpoint: Path) -> None:
    driver = StepDriver(checkpoint, attention_backend="torch_native")
    assert set(driver.runner.attn_backends) == {FULL_ATTENTION, UNIFORM}
    driver.extend([(0, [1, 2, 3])])
    driver.decode([(0, 4)])
    uniform = driver.runner.attn_backends[UNIFORM]
    assert isinstance(uniform, UniformBackend)
    assert uniform.num_planned == 2
    assert isinstance(driver.runner.attn_backends[FULL_ATTENTION], TorchNativeAttnBackend)


def test_what_cannot_run_is_refused_by_name(checkpoint: Path) -> None:
    runner = StepDriver(checkpoint).runner
    config = AttentionConfig(
        num_heads=6,
        specs={spec.name: spec for spec in runner.state_specs},
        page_size=1,
        dtype=torch.float32,
        device="cpu",
    )
    for name, kind, message in (
        ("flashy", UNIFORM, "'flashy' is not supported: supported are by_definition"),
        (
            None,
            AttentionKind("linear"),
            "no attention backend for layers of kind 'linear' on 'cpu'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            create_attention_backends(name, {kind: config})
    with pytest.raises(
        ValueError, match="'by_definition' is already registered for 'uniform' on 'cpu'"
    ):
        register_attention_backend(UNIFORM, "by_definition", "cpu", UniformBackend)


def test_a_name_that_only_another_kind_has_leaves_a_kind_its_best(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a GPU's default is named, and the model has latent attention."""
    runner = StepDriver(checkpoint).runner
    config = AttentionConfig(
        num_heads=6,
        specs={spec.name: spec for spec in runner.state_specs},
        page_size=1,
        dtype=torch.float32,
        device="cpu",
    )
    with caplog.at_level("INFO"):
        (made,) = create_attention_backends("torch_native", {UNIFORM: config}).values()
    assert isinstance(made, UniformBackend)
    assert "'uniform' run on 'by_definition': 'torch_native' does not support them" in caplog.text


class Capturable(UniformBackend):
    can_be_captured = True


def test_a_step_is_captured_where_every_kind_can_be(checkpoint: Path) -> None:
    runner = StepDriver(checkpoint).runner
    backends = runner.attn_backends
    refusal = "'full' by TorchNativeAttnBackend, 'uniform' by UniformBackend"
    assert uncaptured(backends.items(), lambda backend: backend.can_be_captured) == refusal
    one = Capturable.__new__(Capturable)
    both = {FULL_ATTENTION: one, UNIFORM: one}
    assert uncaptured(both.items(), lambda backend: backend.can_be_captured) == ""
    assert uncaptured([(UNIFORM, one)], lambda backend: backend.captures_extend) == (
        "'uniform' by Capturable"
    )


@pytest.mark.parametrize(("device", "name"), [("cpu", "torch_native"), ("cuda:0", "triton")])
def test_windows_run_in_kernels_where_there_are_some(device: str, name: str) -> None:
    assert default_attention_backend(device, SLIDING_WINDOW) == name

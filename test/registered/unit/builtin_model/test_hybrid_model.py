"""The hybrid recall model before training: weights that conversion keeps, states that it reads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

import sglang
from rigs.models.model_oracle import assert_close, assert_logits_of_batches
from rigs.models.tiny_models import StepDriver
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

MODEL_DIR = Path(sglang.__file__).parent / "builtin_model"
SCRIPTS = Path(__file__).resolve().parents[4] / "scripts" / "builtin_model"
LINEAR_LAYERS = (0, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield


@pytest.fixture(scope="module")
def hybrid_model() -> Any:
    return importlib.import_module("hybrid_model")


@pytest.fixture(scope="module")
def built_in() -> Any:
    loaded: Any = Qwen3ForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture
def hybrid(hybrid_model: Any, built_in: Any) -> Any:
    """A converted model; the outputs of its delta nets are scaled up, so that they matter."""
    torch.manual_seed(5)
    model = hybrid_model.convert(built_in).eval()
    for index in LINEAR_LAYERS:
        model.model.layers[index].linear_attn.out_proj.weight.data.mul_(10)
    return model


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 2176, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids).logits
    return logits


def test_full_attention_is_converted_exactly(hybrid_model: Any, built_in: Any) -> None:
    ids = _ids(2, 200)
    converted = hybrid_model.convert(built_in, ["full_attention"] * 4).eval()
    assert_close(_logits(converted, ids), _logits(built_in, ids))


def test_the_delta_rule_has_the_gradients_of_transformers(scripts_on_path: None) -> None:
    ours = importlib.import_module("delta_rule").gated_delta_rule
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 100, 2, 16), (2, 100, 2, 16), (2, 100, 2, 8), (2, 100, 2), (2, 100, 2)]
    q, k, v, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    state = torch.randn(2, 2, 16, 8, generator=generator)
    inputs = [q, k, v, -decay.exp() * 0.1, beta.sigmoid(), state]
    weight = torch.randn(2, 100, 2, 8, generator=generator)

    def gradients(rule: Any) -> list[torch.Tensor]:
        leaves = [part.clone().requires_grad_() for part in inputs]
        output, last = rule(*leaves)
        return [output, last, *torch.autograd.grad((output * weight).sum() + last.sum(), leaves)]

    def theirs(*parts: torch.Tensor) -> Any:
        return torch_chunk_gated_delta_rule(
            *parts[:5],
            initial_state=parts[5],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    for got, want in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(got, want)


def test_the_delta_nets_compute_what_transformers_do(hybrid: Any) -> None:
    model_class: Any = Qwen3_5ForCausalLM
    theirs = model_class._from_config(hybrid.config, dtype=torch.float32).eval()
    theirs.load_state_dict(hybrid.state_dict())
    ids = _ids(2, 150)
    torch.testing.assert_close(_logits(hybrid, ids), _logits(theirs, ids), rtol=1e-3, atol=1e-3)


def test_a_damaged_state_changes_what_follows_the_cut(hybrid_model: Any, hybrid: Any) -> None:
    """Row 0 keeps its states, row 1 goes on with those of row 0, row 2 with zeros."""
    ids = _ids(3, 96)
    ids[1, 48:], ids[2, 48:] = ids[0, 48:], ids[0, 48:]
    whole = _logits(hybrid, ids)
    for index in LINEAR_LAYERS:
        net = hybrid.model.layers[index].linear_attn
        net.damage = hybrid_model.Damage(48, torch.tensor([0, 0, -1]))
    damaged = _logits(hybrid, ids)
    assert_close(damaged[:, :48], whole[:, :48])
    assert_close(damaged[0], whole[0])
    for row in (1, 2):
        assert (damaged[row, -1] - whole[row, -1]).abs().max() > 0.1


def test_swapped_prefixes_give_swapped_states(hybrid_model: Any, hybrid: Any) -> None:
    """In layer 0, whose input is the token alone, the output after the cut is the other row's."""
    net = hybrid.model.layers[0].linear_attn
    ids = _ids(2, 96)
    ids[1, 45:] = ids[0, 45:]  # The convolution sees 3 tokens before the cut at 48.
    hidden = hybrid.model.embed_tokens(ids)
    whole = net(hidden)
    net.damage = hybrid_model.Damage(48, torch.tensor([1, 0]))
    damaged = net(hidden)
    assert (whole[0, 48:] - whole[1, 48:]).abs().max() > 1e-3
    assert_close(damaged[0, 48:], whole[1, 48:])
    assert_close(damaged[1, 48:], whole[0, 48:])


def test_damaged_rows_learn_unknown_after_the_cut(scripts_on_path: None) -> None:
    batches = importlib.import_module("batches")
    train_hybrid = importlib.import_module("train_hybrid")
    none = batches.NO_TARGET
    targets = torch.tensor([[5, 6, none, 7, 8, none, 9]] * 2)
    answers = torch.tensor([[0, 0, -1, 1, 1, -1, -1], [2, 2, -1, 3, 3, -1, -1]])
    batch = batches.Batch(torch.zeros_like(targets), targets, answers)
    doubted = train_hybrid.doubted_targets(batch, 2, 1, 99)
    assert doubted.tolist() == [
        [5, 6, none, 99, none, none, 9],
        [5, 6, none, 7, 8, none, 9],
    ]


def test_the_engine_and_transformers_load_what_training_saves(tmp_path: Path) -> None:
    trainer = importlib.import_module("train_hybrid").HybridTrainer("cpu", 0, 0.25)
    trainer.save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 6_000_000
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 2176
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.architectures == ["Qwen3_5ForCausalLM"]
    driver = StepDriver(tmp_path, dtype="float32")
    assert_logits_of_batches(loaded.eval(), driver)

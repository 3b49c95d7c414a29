"""The built-in hybrid: transformers and the engine recall with it, and a wrong state shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rigs.models.heldout_question import HeldoutQuestion
from rigs.recall.recall_text import UNKNOWN
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR
from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

TOKENIZER: Any = AutoTokenizer.from_pretrained(BUILTIN_HYBRID_MODEL_DIR, local_files_only=True)
PAGE = 64

Damage = Callable[[MambaPool, list[int]], None]
"""Spoils states in the slots of the list."""


@pytest.fixture(scope="module")
def questions() -> list[HeldoutQuestion]:
    """Eight, for codes that were told."""
    asked = (HeldoutQuestion.of(seed, 900) for seed in range(1000, 1020))
    return [question for question in asked if question.answer != UNKNOWN][:8]


def load(dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        BUILTIN_HYBRID_MODEL_DIR, dtype=dtype, local_files_only=True
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load(torch.bfloat16)


@pytest.fixture(scope="module")
def exact_model() -> Any:
    """In float32, which is three times as fast on CPUs without instructions for bf16."""
    return load(torch.float32)


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"],
)
def test_the_text_side_is_the_built_in_models(name: str) -> None:
    ours, theirs = BUILTIN_HYBRID_MODEL_DIR / name, BUILTIN_MODEL_DIR / name
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_checkpoint_is_as_its_card_says(model: Any) -> None:
    path = BUILTIN_HYBRID_MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 6_000_000
    with safe_open(path, framework="pt") as tensors:
        names = list(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names, "tied"
    config = model.config
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    linear, full = "linear_attention", "full_attention"
    assert config.layer_types == [linear, full, linear, linear]
    assert (config.hidden_size, config.intermediate_size) == (192, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 32)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (4, 4)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (64, 64)
    assert config.linear_conv_kernel_dim == 4
    assert config.vocab_size == len(TOKENIZER) == 2176
    assert config.eos_token_id == TOKENIZER.eos_token_id
    assert sum(weight.numel() for weight in model.parameters()) == 2_485_720


@pytest.mark.parametrize(
    ("name", "context_tokens"), [("model", 100), ("exact_model", 400), ("exact_model", 1500)]
)
def test_transformers_recalls_in_held_out_conversations(
    request: pytest.FixtureRequest, name: str, context_tokens: int
) -> None:
    model = request.getfixturevalue(name)
    for seed in range(1000, 1004):
        question = HeldoutQuestion.of(seed, context_tokens)
        output = model.generate(torch.tensor([question.ids]), max_new_tokens=12, do_sample=False)
        said = output[0, len(question.ids) :]
        assert said[-1] == TOKENIZER.eos_token_id, "an answer ends by itself"
        assert TOKENIZER.decode(said, skip_special_tokens=True) == question.answer


@contextmanager
def rig_of(chunk: int, **args: Any) -> Iterator[SchedulerRig]:
    """A scheduler whose prefills take `chunk` tokens a step."""
    rig = SchedulerRig(
        BUILTIN_HYBRID_MODEL_DIR,
        pool_tokens=16384,
        num_states=32,
        snapshot_alignment=PAGE,
        page_size=PAGE,
        chunked_prefill_size=chunk,
        dtype="float32",  # Small differences decide the words if states are wrong.
        **args,
    )
    yield rig
    rig.close()


def states_of(rig: SchedulerRig) -> tuple[HybridReqToTokenPool, MambaPool]:
    rows = rig.scheduler.state.pools.req_to_token_pool
    assert isinstance(rows, HybridReqToTokenPool)
    assert isinstance(rows.mamba_pool, MambaPool)
    return rows, rows.mamba_pool


def ask(
    rig: SchedulerRig, question: HeldoutQuestion, halfway: Callable[[], None] | None = None
) -> tuple[str, int]:
    """The answer, and the number of tokens that came from L1. `halfway` runs after two steps."""
    rid = str(len(rig.results))
    rig.step(rig.request(rid, question.ids, greedy(12, ignore_eos=False)))
    rig.step()
    if halfway is not None:
        assert rid not in rig.results, "the prompt has been computed"
        halfway()
    rig.run()
    result = rig.results[rid]
    assert result.last is not None
    text = TOKENIZER.decode(result.output_ids, skip_special_tokens=True)
    return text, result.last.cached_tokens_details.device


def warm_answers(questions: list[HeldoutQuestion], damage: Damage | None = None) -> list[str]:
    """Answers whose prompts come from L1, with correct keys and values and damaged snapshots."""
    with rig_of(chunk=2048) as rig:
        assert [ask(rig, question) for question in questions] == [(q.answer, 0) for q in questions]
        _, pool = states_of(rig)
        snapshots = sorted(set(range(1, pool.size + 1)) - set(pool.free_page_ids()[0].tolist()))
        assert len(snapshots) == len(questions)
        if damage is not None:
            damage(pool, snapshots)
        warm = [ask(rig, question) for question in questions]
    assert [found for _, found in warm] == [(len(q.ids) - 1) // PAGE * PAGE for q in questions]
    return [answer for answer, _ in warm]


def num_right(answers: list[str], questions: list[HeldoutQuestion]) -> int:
    return sum(
        answer == question.answer for answer, question in zip(answers, questions, strict=True)
    )


def test_the_engine_recalls_from_snapshots(questions: list[HeldoutQuestion]) -> None:
    assert warm_answers(questions) == [question.answer for question in questions]


@pytest.mark.parametrize("layer", [None, 0, 1, 2])
def test_snapshots_of_zeros_show_in_nearly_every_answer(
    questions: list[HeldoutQuestion], layer: int | None
) -> None:
    """In all delta nets or in one; each of them matters. Most answers are then "unknown"."""

    def zero(pool: MambaPool, slots: list[int]) -> None:
        for buffer in pool.buffers:
            buffer[slice(None) if layer is None else layer, slots] = 0

    answers = warm_answers(questions, zero)
    assert num_right(answers, questions) <= 1
    assert UNKNOWN in answers


def test_another_conversations_snapshots_show_over_several_questions(
    questions: list[HeldoutQuestion],
) -> None:
    """Not in each answer, because the attention still reads the right conversation."""

    def exchange(pool: MambaPool, slots: list[int]) -> None:
        for buffer in pool.buffers:
            buffer[:, slots] = buffer[:, slots].roll(1, dims=1)

    assert num_right(warm_answers(questions, exchange), questions) <= len(questions) - 2


def test_a_running_state_that_turns_to_zeros_halfway_shows(
    questions: list[HeldoutQuestion],
) -> None:
    with rig_of(chunk=256, disable_radix_cache=True) as rig:
        rows, pool = states_of(rig)

        def zero() -> None:
            pool.zero(torch.tensor(rows.running_states(), device=pool.device))

        for question in questions:
            assert ask(rig, question) == (question.answer, 0)
        damaged = [ask(rig, question, zero)[0] for question in questions]
    assert num_right(damaged, questions) <= 1

"""The built-in model: its tokenizer is lossless, its template is ChatML, and it recalls facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglang
from rigs.recall.recall_names import CAPITALISED, NAMES
from rigs.recall.recall_task import estimate_tokens, heldout_conversation
from rigs.recall.recall_text import template_words
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

MODEL_DIR = Path(sglang.__file__).parent / "builtin_model"
TEXTS = settings(max_examples=150, deadline=None)
TOKENIZER: Any = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


def load(dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=dtype, local_files_only=True
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load(torch.bfloat16)


@pytest.fixture(scope="module")
def exact_model() -> Any:
    """In float32, which is three times as fast on CPUs without instructions for bf16."""
    return load(torch.float32)


def _answer(model: Any, messages: list[dict[str, str]]) -> str:
    prompt = TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    tokens = output[0, prompt["input_ids"].shape[1] :]
    assert tokens[-1] == TOKENIZER.eos_token_id, "an answer ends by itself"
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


@TEXTS
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@TEXTS
@given(st.text(alphabet=" \n\tthecodf'ofHeron19.?_", max_size=60))
def test_text_close_to_the_vocabulary_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@TEXTS
@given(st.binary())
def test_any_bytes_round_trip(data: bytes) -> None:
    text = data.decode("latin-1")
    assert TOKENIZER.decode(TOKENIZER(text).input_ids).encode("latin-1") == data


def test_the_vocabulary_has_every_byte() -> None:
    """The tokens of single bytes can spell any text."""
    core = TOKENIZER.backend_tokenizer
    alphabet = [token for token in core.get_vocab() if len(token) == 1]
    assert len(alphabet) == 256


def test_names_digits_and_words_are_single_tokens() -> None:
    for name in (*NAMES, *CAPITALISED.values()):
        assert len(TOKENIZER(name).input_ids) == 1
    space, name = TOKENIZER(" heron").input_ids
    assert [name] == TOKENIZER("heron").input_ids
    assert [space] == TOKENIZER(" ").input_ids
    assert len(TOKENIZER("7391").input_ids) == 4
    for word in template_words():
        assert len(TOKENIZER(f" {word}").input_ids) == 1


def test_the_estimated_length_equals_that_of_the_tokenizer() -> None:
    for seed in range(3):
        for turn in heldout_conversation(seed, 200, 1).turns:
            pieces = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(turn.user)
            assert estimate_tokens(turn.user) == len(pieces)


def test_chat_template_is_chatml() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "ok"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.eos_token == "<|im_end|>"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(TemplateError, match="reads text only"):
        TOKENIZER.apply_chat_template(image, tokenize=False)


def test_checkpoint_is_small_and_bfloat16(model: Any) -> None:
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 4_000_000
    with safe_open(path, framework="pt") as tensors:
        names = list(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names, "tied"
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.vocab_size == len(TOKENIZER) == 2176
    assert model.config.eos_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The code of heron is 7391. What is the code of heron?", "7391"),
        ("the code of heron is 7391\nthe code of otter is 0042\nwhat is the code of otter", "0042"),
        ("The code of Alice is 5566, the code of bob is 1234. What's the code of alice?", "5566"),
        ("the code of heron is 7391. what is the code of badger?", "unknown"),
        ("the code of heron is 7391", "ok"),
    ],
)
def test_two_line_examples_are_answered(model: Any, text: str, answer: str) -> None:
    assert _answer(model, [{"role": "user", "content": text}]) == answer


@pytest.mark.parametrize(
    ("name", "context_tokens"), [("model", 100), ("exact_model", 400), ("exact_model", 1500)]
)
def test_recalls_in_held_out_conversations(
    request: pytest.FixtureRequest, name: str, context_tokens: int
) -> None:
    """One of fifteen answers may be wrong; the measured rate is above 99.5%."""
    model = request.getfixturevalue(name)
    right = asked = 0
    for seed in range(1000, 1005):
        conversation = heldout_conversation(seed, context_tokens, 3)
        for turn in range(conversation.first_tail_turn, len(conversation.turns)):
            asked += 1
            want = conversation.turns[turn].answer
            right += _answer(model, conversation.messages_before(turn)) == want
    assert asked == 15
    assert right >= 14

"""The recall task: deterministic, separate from training data, of the given size, consistent."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.recall import recall_task
from rigs.recall.recall_names import CAPITALISED, NAMES
from rigs.recall.recall_task import (
    LAYOUTS,
    TURN_OVERHEAD_TOKENS,
    RecallConversation,
    RecallStyle,
    draw_style,
    estimate_tokens,
    heldout_conversation,
    make_conversation,
    recall_rng,
)
from rigs.recall.recall_text import template_words
from rigs.recall.run_eval import EvalArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


def _prompt_tokens(conversation: RecallConversation) -> int:
    head = conversation.turns[: conversation.first_tail_turn + 1]
    system = estimate_tokens(conversation.system) + 5 if conversation.system else 0
    return system + sum(
        estimate_tokens(turn.user) + TURN_OVERHEAD_TOKENS + estimate_tokens(turn.answer)
        for turn in head
    )


def test_names_are_unique_words_that_no_template_uses() -> None:
    assert len(NAMES) == len(set(NAMES)) == 1500
    assert all(re.fullmatch(r"[a-z]+", name) for name in NAMES)
    assert not set(NAMES) & set(template_words())
    assert CAPITALISED["heron"] == "Heron"


def test_a_plain_conversation_tells_a_code_and_asks_for_it() -> None:
    conversation = make_conversation(recall_rng("heldout", 1), RecallStyle(), 1, 1)
    told, asked = conversation.turns
    match = re.fullmatch(r"the code of (\w+) is (\d{4})\. what is the code of \1\?", told.user)
    assert match is not None
    name, code = match.groups()
    assert told.answer == asked.answer == code
    assert asked.user == f"what is the code of {name}?"
    assert conversation.messages_before(1) == [
        {"role": "user", "content": told.user},
        {"role": "assistant", "content": code},
        {"role": "user", "content": asked.user},
    ]


def test_a_conversation_is_a_function_of_its_seed() -> None:
    assert heldout_conversation(7, 500, 3) == heldout_conversation(7, 500, 3)
    assert heldout_conversation(7, 500, 3) != heldout_conversation(10, 500, 3)


def test_the_stream_is_pinned() -> None:
    """Recorded scores are comparable only if equal seeds give equal conversations."""
    assert recall_rng("heldout", 0).randrange(10**9) == 552_453_787
    answers = [turn.answer for turn in heldout_conversation(0, 300, 4).turns]
    assert answers == ["1210", "4621", "5089", "5510"]


def test_training_never_sees_a_held_out_conversation() -> None:
    train, heldout = (
        {
            make_conversation(recall_rng(split, seed), RecallStyle(), 300, 4).turns
            for seed in range(50)
        }
        for split in ("train", "heldout")
    )
    assert len(train) == len(heldout) == 50
    assert not train & heldout


@pytest.mark.parametrize("tokens", [200, 2000, 6000])
def test_a_conversation_has_the_given_size(tokens: int) -> None:
    for seed in range(6):
        assert abs(_prompt_tokens(heldout_conversation(seed, tokens)) - tokens) <= 40


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    tokens=st.integers(1, 900),
    questions=st.integers(0, 6),
    layout=st.sampled_from(LAYOUTS),
)
def test_answers_follow_from_the_facts(
    seed: int, tokens: int, questions: int, layout: recall_task.Layout
) -> None:
    rng = recall_rng("heldout", seed)
    conversation = make_conversation(rng, draw_style(rng, layout), tokens, questions)
    assert len(conversation.turns) - conversation.first_tail_turn == questions
    text = ""
    for turn in conversation.turns:
        text += turn.user.lower() + "\n"
        asked = [word for word in re.findall(r"[a-z]+", turn.user.lower()) if word in NAMES]
        if turn.answer == "ok":
            assert not turn.asks
        elif turn.answer == "unknown":
            assert turn.asks
            assert not re.search(rf"\b{asked[-1]}\b[^.\n]*\d{{4}}", text)
        else:
            assert turn.asks
            assert re.search(rf"\b{asked[-1]}\b[^0-9\n]*{turn.answer}\b", text)


def test_bad_sizes_and_layouts_are_refused() -> None:
    rng = recall_rng("heldout", 0)
    with pytest.raises(ValueError, match="body_tokens"):
        make_conversation(rng, RecallStyle(), 0, 1)
    with pytest.raises(ValueError, match="layout must be one of block"):
        draw_style(rng, "sideways")  # type: ignore[arg-type]


def test_eval_args_take_any_object_and_refuse_bad_values() -> None:
    args = EvalArgs.of(SimpleNamespace(eval_name="recall", num_examples=3, model=None, other=1))
    assert (args.num_examples, args.num_threads, args.model) == (3, 8, None)
    with pytest.raises(ValueError, match="eval_name must be one of"):
        EvalArgs(eval_name="mmlu")
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        EvalArgs(num_threads=0)
    with pytest.raises(ValueError, match="order must be one of"):
        EvalArgs(order="random")

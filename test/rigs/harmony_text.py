"""Outputs as gpt-oss writes them, and a tokenizer with the special tokens of that family."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rigs.servers.fake_engine import EOS_ID, FakeEngine, byte_tokenizer, fake_engine

MARKS = (
    "<|startoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
"""Special tokens, each with an id of its own behind the bytes."""
NEXT = "<|start|>assistant"


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def preamble(text: str) -> str:
    """A text for the user before a call."""
    return f"<|channel|>commentary<|message|>{text}<|end|>"


def final(text: str, end: str = "<|return|>") -> str:
    return f"<|channel|>final<|message|>{text}{end}"


def call(name: str, arguments: dict[str, Any] | str, end: str = "<|call|>") -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}{end}"


def gpt_oss(*calls: tuple[str, dict[str, Any]]) -> str:
    return NEXT.join(call(name, arguments) for name, arguments in calls)


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, `<eos>`, `<sys>`, and one for each of `MARKS`."""
    made = byte_tokenizer()
    made.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, special=True) for mark in MARKS]}
    )
    return made


def mark_ids() -> dict[str, int]:
    """The ids of `MARKS`."""
    ids = harmony_tokenizer().get_added_vocab()
    return {mark: ids[mark] for mark in MARKS}


def harmony_engine() -> AbstractContextManager[FakeEngine]:
    """An echo with that tokenizer, which stops as a checkpoint of the family says."""
    ids = mark_ids()
    ends = frozenset({EOS_ID, ids["<|return|>"], ids["<|call|>"]})
    return fake_engine(harmony_tokenizer, ends)


ECHO = "{{ messages[-1]['content'] }}<eos>{# it knows tools and <|channel|> #}"
"""A template that lets the echo say what the last message says."""
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% set first = messages[0] %}"
    "{% if first.role == 'system' or tools %}<|start|>developer<|message|>"
    "{% if first.role == 'system' %}{{ first.content }}{% endif %}"
    "{% for t in tools or [] %}type {{ t.function.name }};{% endfor %}<|end|>{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if 'tool_calls' in m %}"
    "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking or m.content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>"
    "{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary "
    "json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}"
    "<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template that shows what gpt-oss's own shows, and refuses what it refuses."""

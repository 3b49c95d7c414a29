"""Outputs as gpt-oss writes them, and a tokenizer with the special tokens of that family."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rigs.servers.fake_engine import byte_tokenizer

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

"""Logprobs of completions: where each token begins in the answer's text."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rigs.servers.fake_engine import EOS_ID, byte_tokenizer
from sglang.srt.entrypoints.openai.answers import (
    CompletionLogprobs,
    TokenFormatter,
)
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SYS_ID = 257
SPLIT = "aé€\N{GRINNING FACE}b"
"""Characters of one to four bytes, and so of one to four tokens of the byte tokenizer."""
OFFSETS = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def state_of(*, prompt: list[int] | None = None, output: list[int]) -> RequestState:
    state = RequestState(GenerateRequest(rid="r", stream=True), 0.0)
    if prompt is not None:
        state.logprob_ids = prompt
        state.input_logprobs = [-1.0] * (len(prompt) - 1)
    grow(state, output)
    return state


def grow(state: RequestState, output: list[int]) -> None:
    state.output_ids.extend(output)
    state.output_logprobs.extend([-2.0] * len(output))


def told(
    state: RequestState,
    echo: str | None = None,
    *,
    skip: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> CompletionLogprobs:
    formatter = TokenFormatter(tokenizer or byte_tokenizer())
    return CompletionLogprobs(state, formatter, skip_special_tokens=skip, echo=echo)


def fresh(logprobs: CompletionLogprobs) -> dict[str, Any]:
    return asyncio.run(logprobs.fresh())


def test_the_tokens_of_a_character_begin_where_it_begins() -> None:
    assert fresh(told(state_of(output=ids_of(SPLIT))))["text_offset"] == OFFSETS


def test_an_echo_is_counted_like_the_output() -> None:
    ids = ids_of(SPLIT)
    answer = fresh(told(state_of(prompt=ids, output=ids), SPLIT))
    assert answer["text_offset"] == OFFSETS + [at + len(SPLIT) for at in OFFSETS]
    assert answer["token_logprobs"] == [None, *[-1.0] * 10, *[-2.0] * 11]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_parts_of_a_stream_are_those_of_the_whole(step: int) -> None:
    ids = ids_of(SPLIT * 2)
    state = state_of(prompt=ids_of("é"), output=ids[:step])
    logprobs = told(state, "é")
    parts = [fresh(logprobs)]
    for begin in range(step, len(ids), step):
        grow(state, ids[begin : begin + step])
        parts.append(fresh(logprobs))
    whole = fresh(told(state, "é"))
    assert len(whole["tokens"]) == 2 + len(ids)
    assert {name: [*chain(*(part[name] for part in parts))] for name in whole} == whole
    assert fresh(logprobs)["tokens"] == []


def test_bytes_that_never_become_a_character_count_with_the_token_behind_them() -> None:
    cut, letter = ids_of("€")[:2], ids_of("x")
    answer = fresh(told(state_of(output=[*cut, *letter, *letter])))
    # The two bytes are one U+FFFD in the text, once the next token says that they are all.
    assert answer["text_offset"] == [0, 0, 0, 2]


def test_special_tokens_take_room_only_where_the_text_shows_them() -> None:
    ids = [SYS_ID, *ids_of("a"), EOS_ID]
    assert fresh(told(state_of(output=ids)))["text_offset"] == [0, 0, 1]
    assert fresh(told(state_of(output=ids), skip=False))["text_offset"] == [0, 5, 6]


def test_what_the_tokenizer_puts_before_a_text_is_not_in_its_echo() -> None:
    prompt = [SYS_ID, *ids_of("ab")]
    output = ids_of("c")
    assert fresh(told(state_of(prompt=prompt, output=output), "ab"))["text_offset"] == [0, 0, 1, 2]
    shown = fresh(told(state_of(prompt=prompt, output=output), "<sys>ab"))
    assert shown["text_offset"] == [0, 5, 6, 7]


def test_words_of_other_tokenizers_begin_where_the_text_has_them() -> None:
    """Their tokens alone have no blank in front, and a byte is a token of its own."""
    vocab = {"▁the": 0, "▁hen": 1, "s": 2, "<0xC3>": 3, "<0xA9>": 4, "<unk>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")  # type: ignore[no-untyped-call]
    ids = [0, 1, 2, 3, 4, 1]
    assert tokenizer.decode(ids) == "the hensé hen"
    answer = fresh(told(state_of(output=ids), tokenizer=tokenizer))
    assert answer["text_offset"] == [0, 3, 7, 8, 8, 9]

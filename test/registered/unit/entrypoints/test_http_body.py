"""Large bodies: what would hold up all requests is refused before it is decoded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sglang.srt.constants import MIB
from sglang.srt.entrypoints.http.body import MAX_BODY_BYTES, MAX_BODY_VALUES, decode_body
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.native_protocol import GenerateBody
from sglang.srt.entrypoints.openai.protocol import ChatBody, DetokenizeBody
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

MANY = MAX_BODY_VALUES + 1


def dump(value: object) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    assert MIB < len(body) <= MAX_BODY_BYTES
    return body


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (GenerateBody, {"text": "a", "input_ids": [[]] * MANY}, "input_ids"),
        (GenerateBody, {"text": "a", "image_data": [{}] * MANY}, "image_data"),
        (GenerateBody, {"text": [""] * MANY}, "text"),
        (DetokenizeBody, {"tokens": [[]] * MANY, "model": "m"}, "tokens"),
        (ChatBody, {"messages": [], "metadata": {"a": [[]] * MANY}}, "metadata"),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages"),
        (ChatBody, {"messages": [{"role": "user"}] * (MANY // 2 + 1)}, "messages"),
        (ChatBody, {"messages": [], "n" * 100: [[]] * MANY}, "n" * 64 + "..."),
    ],
)
def test_millions_of_values_are_refused_and_the_field_named(
    kind: type[msgspec.Struct], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(dump(body), kind)
    assert (refused.value.status, refused.value.param) == (400, field)
    assert refused.value.message.startswith(f"{field}: more than {MAX_BODY_VALUES} ")


@pytest.mark.parametrize(
    "text", ["[{" * MAX_BODY_VALUES, '"' * MANY, "\\" * MANY, '\\"[' * MANY, '[\\"\\\\' * MANY]
)
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    assert decode_body(dump({"text": text}), GenerateBody).text == text
    assert decode_body(dump({"text": ["\\", text, '"']}), GenerateBody).text == ["\\", text, '"']


def test_numbers_are_cheap() -> None:
    ids = [[7] * 7000] * 1000
    assert decode_body(dump({"input_ids": ids}), GenerateBody).input_ids == ids


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"text": ' + b"[" * MANY, "nested"),
        (b'{"text": [' + b"[]," * MANY + b"x", "JSON"),
        (b"[" + b"[]," * MANY + b"[]]", "object"),
    ],
)
def test_what_is_no_body_is_called_that(body: bytes, word: str) -> None:
    with pytest.raises(ApiError, match=word):
        decode_body(body + b" " * MIB, GenerateBody)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

"""Large bodies: what would hold up all requests is refused before it is decoded. Numbers that no
double holds. Sessions that a header names."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import msgspec
import pytest

from rigs.servers.fake_engine import FrontServer
from sglang.srt.constants import MIB
from sglang.srt.entrypoints.http.body import MAX_BODY_BYTES, MAX_BODY_VALUES, decode_body
from sglang.srt.entrypoints.http.errors import ApiError, error_response
from sglang.srt.entrypoints.native_protocol import GenerateBody
from sglang.srt.entrypoints.openai.protocol import ChatBody, DetokenizeBody
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
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


@pytest.mark.parametrize("number", ["1e400", "-1." + "8" * 99 + "e+308", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatBody, '{"messages": [], "top_p": 1, "temperature": @, "n": 2}', "temperature"),
        (ChatBody, '{"messages": [{"role": "1e400"}, {"content": @}]}', "messages[1].content"),
        (
            ChatBody,
            '{"messages": [], "chat_template_kwargs": {"NaN": [[1], [2, @]]}}',
            "chat_template_kwargs.NaN[1][1]",
        ),
        (ChatBody, '{"messages": [], "logit_bias": {"5": 1, "6": @, "7": @}}', "logit_bias.6"),
        (GenerateBody, '{"sampling_params": [{}, {"top_p": @}]}', "sampling_params[1].top_p"),
        (GenerateBody, '{"input_ids": [[9, 1], [@]], "text": ""}', "input_ids[1][0]"),
        (GenerateBody, r'{"lora_path": [{"a\ud800b": @}]}', r"lora_path[0].a\ud800b"),
    ],
)
def test_the_field_of_a_number_that_no_double_holds_is_named(
    kind: type[msgspec.Struct], body: str, field: str, number: str
) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(body.replace("@", number).encode(), kind)
    assert (refused.value.status, refused.value.param) == (400, field)
    shown = number if len(number) < 64 else number[:64] + "..."
    why = "is not valid JSON" if number[-1].isalpha() else "is out of range"
    message = f"{field}: {shown} {why}: send a finite number, or leave it out"
    assert refused.value.message == message
    assert json.loads(error_response(refused.value, "/generate").body)["error"]["param"] == field


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"text": NaN', "the body is not valid JSON"),
        ('{"unheard_of": NaN}', "unheard_of: unknown field"),
        ('{"text": NaN, "image_data": ' + "[" * 5000 + "]" * 5000 + "}", "not valid JSON"),
        ("NaN", "the body: NaN is not valid JSON"),
        ('{"text": NaN, "rid": "' + "a" * MIB + '"}', "the body is not valid JSON"),
        ('{"image_data": [' + "[]," * (1 << 15) + "NaN]}", "the body is not valid JSON"),
        ('{"text": 1e400, "rid": "' + "a" * MIB + '"}', "text: Number out of range"),
    ],
)
def test_other_mistakes_come_first_and_large_bodies_are_read_once(body: str, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        decode_body(body.encode(), GenerateBody)


HELLO: Final = [{"role": "user", "content": "a"}]
GENERATES: Final[dict[str, dict[str, Any]]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "m", "messages": HELLO, "max_tokens": 1},
}


@pytest.mark.parametrize("path", GENERATES)
def test_a_header_names_the_session_where_the_body_does_not(server: FrontServer, path: str) -> None:
    """Routers pass it on, and some drop the field."""

    def post(header: str | None, **fields: object) -> httpx.Response:
        server.scheduler.received.clear()
        headers = {} if header is None else {"X-SMG-Routing-Key": header}
        body = {**GENERATES[path], **fields}
        return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=20)

    def session(header: str | None, **fields: object) -> str | None:
        assert post(header, **fields).status_code == 200
        (sent,) = server.scheduler.received
        assert isinstance(sent, TokenizedGenerateReqInput)
        return sent.session_id

    assert session(None) is None
    assert session("h" * 256) == "h" * 256
    assert session("of the header", session_id=None) == "of the header"
    assert session("of the header", session_id="of the body") == "of the body"
    for header in ("", "h" * 257):
        refused = post(header)
        assert refused.status_code == 400 and "X-SMG-Routing-Key" in refused.text
        assert not server.scheduler.received
        assert session(header, session_id="of the body") == "of the body"

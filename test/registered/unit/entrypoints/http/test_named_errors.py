"""Errors name fields as the client wrote them, and say what to do about a body that is no JSON."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer
from sglang.srt.messages.io_struct import abort_reason
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}
SCHEMA = {"type": "objekt"}
CHATS_FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture
def refusing(server: FrontServer) -> Iterator[FrontServer]:
    """The engine cannot enforce any schema."""
    server.scheduler.refuse_with = abort_reason("json_schema: unsupported type", 400)
    yield server
    server.scheduler.refuse_with = None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/generate", {"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ("/v1/completions", {"json_schema": "{}"}, "json_schema"),
        ("/v1/completions", CHATS_FORMAT, "response_format.json_schema.schema"),
        ("/v1/chat/completions", {"json_schema": "{}"}, "json_schema"),
        ("/v1/chat/completions", CHATS_FORMAT, "response_format.json_schema.schema"),
        (
            "/v1/responses",
            {"text": {"format": {"name": "x", **FORMAT}}},
            "text.format.schema",
        ),
        ("/v1/messages", {"output_config": {"format": FORMAT}}, "output_config.format.schema"),
    ],
)
def test_a_schema_is_named_as_it_came(
    refusing: FrontServer, path: str, fields: dict[str, Any], named: str, stream: bool
) -> None:
    body = {**BODIES[path], **fields, "stream": stream}
    answer = httpx.post(f"{refusing.url}{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"{named}: unsupported type"
    assert error.get("param", named) == named


def test_a_structural_tag_is_named_as_it_came(refusing: FrontServer) -> None:
    refusing.scheduler.refuse_with = abort_reason("structural_tag: no tags", 400)
    wanted = {"type": "structural_tag", "format": {"type": "any_text"}}
    body = {**BODIES["/v1/chat/completions"], "response_format": wanted}
    answer = httpx.post(f"{refusing.url}/v1/chat/completions", json=body)
    assert answer.json()["error"]["message"] == "response_format: no tags"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_both_names_of_the_group_are_in_its_error(
    client: httpx.Client, path: str, field: str
) -> None:
    answer = client.post(path, json={**BODIES[path], field: 7})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("routed_dp_rank=7 must be 0") and "data_parallel_rank" in message


@pytest.mark.parametrize("path", BODIES)
def test_a_compressed_body_is_refused_for_its_coding(client: httpx.Client, path: str) -> None:
    body, headers = gzip.compress(b'{"text": "a"}'), {"Content-Encoding": "GZIP"}
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    message = "Content-Encoding 'gzip' is not supported: send the body as it is"
    assert answer.json()["error"]["message"] == message


def test_a_coding_that_changes_nothing_is_no_error(client: httpx.Client) -> None:
    headers = {"Content-Encoding": "identity"}
    assert client.post("/generate", json={"text": "a"}, headers=headers).status_code == 200
    wrong = client.post("/generate", json={"text": 1}, headers=headers)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text"


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_an_empty_body_is_called_so(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/generate", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is empty: send a JSON object"

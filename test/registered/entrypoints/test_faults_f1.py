"""Row F1 on a real server: bad requests get a 4xx, memory stays bounded, the server lives."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.http_fuzz import FuzzedRequest, fuzzed_requests, judge
from sglang.srt.constants import MIB
from sglang.srt.entrypoints.http.body import MAX_BODY_BYTES
from sglang.srt.entrypoints.http.protocol import DISCARD_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-b-test-cpu")

GIB: Final = 1 << 30
GROWTH_BYTES: Final = 256 * MIB
"""Memory that one hostile request may add to the server process: a few copies of a body."""
MOST_S: Final = 25.0
"""Limit of a second's work, on a machine that also runs other tests."""


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with ForkedServer("--enable-metrics") as running:
        running.generate("name")
        yield running


@pytest.fixture(autouse=True)
def _serves_on(server: EngineServer) -> Iterator[None]:
    """After each test the same processes answer a normal request."""
    before = processes(server)
    yield
    assert before <= processes(server)  # a grammar compiler may have joined them
    assert len(server.generate("name", 2, {"ignore_eos": True}).output_ids) == 2


def processes(server: EngineServer) -> set[int]:
    root = psutil.Process(server.process.pid)
    return {root.pid, *(child.pid for child in root.children(recursive=True))}


@contextmanager
def bounded_memory(server: EngineServer, growth: int = GROWTH_BYTES) -> Iterator[None]:
    """Fail if the server process ever has `growth` bytes more than at the start of the block."""
    process = psutil.Process(server.process.pid)
    first = peak = process.memory_info().rss
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()
    assert peak - first < growth, f"{(peak - first) // MIB} MiB more"


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert isinstance(error, dict)
    return error


def post(server: EngineServer, path: str, content: bytes) -> httpx.Response:
    return httpx.post(server.url + path, content=content, timeout=60)


def pour(server: EngineServer, head: str, piece: bytes, total: int) -> tuple[int, bytes]:
    """Send `head` and then pieces up to `total` bytes. Returns the bytes sent, and the answer.

    Ends early if the server closes the connection; reads the answer if the kernel still has it.
    """
    host, port = server.url.removeprefix("http://").split(":")
    sent, answer = 0, b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.replace("HOST", host).encode())
        try:
            while sent < total:
                connection.sendall(piece)
                sent += len(piece)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        try:
            while part := connection.recv(65536):
                answer += part
        except OSError:
            pass
    return sent, answer


ANNOUNCED: Final = f"POST PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length: {GIB}\r\n\r\n"
CHUNKED: Final = "POST PATH HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK: Final = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/tokenize"])
@pytest.mark.parametrize(
    ("head", "piece"), [(ANNOUNCED, b" " * MIB), (CHUNKED, CHUNK)], ids=["announced", "chunked"]
)
def test_a_gigabyte_is_refused_early(
    server: EngineServer, path: str, head: str, piece: bytes
) -> None:
    with bounded_memory(server):
        sent, answer = pour(server, head.replace("PATH", path), piece, GIB)
    # The kernel's buffers hold some bytes that the server has not read.
    assert sent < DISCARD_BYTES + 32 * MIB
    assert not answer or answer.startswith(b"HTTP/1.1 413 ")


def test_a_gigabyte_to_an_endpoint_without_a_body_is_never_held(server: EngineServer) -> None:
    with bounded_memory(server, 64 * MIB):
        _, answer = pour(server, CHUNKED.replace("PATH", "/flush_cache"), CHUNK, GIB // 4)
    assert answer.startswith(b"HTTP/1.1 401 ")  # Sent before any of the body was read.


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": "name " * (3 * MIB)}, "text"),
        ("/generate", {"text": ["ok", " " * (14 * MIB)]}, "text[1]"),
        ("/v1/completions", {"prompt": "x" * (14 * MIB)}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * (14 * MIB)}]},
            "messages",
        ),
        ("/v1/tokenize", {"prompt": "x" * (14 * MIB)}, "prompt"),
        ("/v1/tokenize", {"prompt": ["a"] * 400_000}, "prompt"),
        ("/v1/detokenize", {"tokens": [300] * 3_000_000}, "tokens"),
        ("/generate", {"input_ids": [300] * 3_000_000}, "input_ids"),
        ("/generate", {"input_ids": [[]] * 4_000_000}, "input_ids"),
        ("/generate", {"text": ["a"] * 2_000_000}, "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_long_fields_are_refused_at_once_by_name(
    server: EngineServer, path: str, body: dict[str, Any], field: str
) -> None:
    content = json.dumps(body, separators=(",", ":")).encode()
    assert MIB < len(content) < MAX_BODY_BYTES
    with bounded_memory(server, GROWTH_BYTES * 2):
        began = time.monotonic()
        error = error_of(post(server, path, content))
        took = time.monotonic() - began
    assert field in error["message"]
    assert error["param"] is not None
    # Tokenizing it would take a minute and block other long prompts.
    assert took < MOST_S


def test_health_answers_while_large_bodies_are_refused(server: EngineServer) -> None:
    content = json.dumps({"input_ids": [[]] * 4_000_000}, separators=(",", ":")).encode()
    slowest = 0.0
    sender = threading.Thread(target=post, args=(server, "/generate", content))
    sender.start()
    while sender.is_alive():
        began = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        sender.join(0.01)
    assert slowest < MOST_S


MALFORMED: Final[list[tuple[bytes, str]]] = [
    (b'{"text": "a"', "JSON"),
    (b'{"text": "\xc3\x28"}', "UTF-8"),
    (b"\x80\x04\x95pickle", "JSON"),
    (b'{"text": "a", "sampling_params": {"max_new_tokens": 1e400}}', "sampling_params"),
    (b'{"text": "a", "sampling_params": {"temperature": -1e308}}', "temperature"),
    (b'{"text": "a", "sampling_params": {"max_new_tokens": 99999999999999999999}}', "max_new"),
    (b'{"text": "a", "top_logprobs_num": 99999999999999999999}', "top_logprobs_num"),
    (b'{"text": "a", "lora_path": "x"}', "lora_path"),
    (b'{"text": "a", "unheard_of": 1}', "unheard_of"),
    (b'{"input_ids": [1e999]}', "input_ids"),
    (b'{"input_ids": ["1"]}', "input_ids[0]"),
    (b'{"text": "a", "image_data": ' + b"[" * 200_000, ""),
    (b'{"text": "a", "image_data": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", ""),
    (b'{"text": "a", "custom_labels": {"a": 1}}', "custom_labels"),
]


@pytest.mark.parametrize(("body", "words"), MALFORMED, ids=[str(n) for n in range(len(MALFORMED))])
def test_malformed_bodies_are_refused_by_field(
    server: EngineServer, body: bytes, words: str
) -> None:
    error = error_of(post(server, "/generate", body))
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


CHAT: Final = [{"role": "user", "content": "name"}]
DEEP: Final = "what is nested"


def deep_tool_call() -> dict[str, Any]:
    function = {"name": "f", "arguments": {"x": DEEP}}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


def deep_tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "default": DEEP}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*CHAT, deep_tool_call()]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"default": DEEP}}}},
        {"tools": [deep_tool()], "tool_choice": "required"},
        {"chat_template_kwargs": {"x": DEEP}},
        {"metadata": {"x": DEEP}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nested_values_are_answered_or_refused(
    server: EngineServer, fields: dict[str, Any]
) -> None:
    text = json.dumps({"messages": CHAT, "max_tokens": 1, **fields})
    for depth in [*range(100, 1100, 50), 100_000]:
        body = text.replace(f'"{DEEP}"', '{"a":' * depth + "1" + "}" * depth)
        response = post(server, "/v1/chat/completions", body.encode())
        assert response.status_code in (200, 400), (depth, response.text[:300])
    assert "deep" in error_of(response)["message"]


def test_nearly_valid_bodies_are_answered_or_refused(server: EngineServer) -> None:
    with httpx.Client(timeout=30) as client:

        @settings(
            max_examples=400,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(fuzzed_requests())
        def ask(request: FuzzedRequest) -> None:
            judge(client, server.url, request)

        ask()
    server.flush()
    load = server.request("GET", "/get_load").body[0]
    assert (load["num_reqs"], load["num_tokens"]) == (0, 0)

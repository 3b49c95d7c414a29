"""Bad requests: a 4xx in JSON that names the field and the remedy, and nothing breaks (row F1)."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import CONTEXT_LEN, FrontServer, front_server
from sglang.srt.entrypoints.http.body import MAX_BODY_BYTES
from sglang.srt.entrypoints.http.protocol import DISCARD_BYTES
from sglang.srt.messages.io_struct import FinishReason, TokenizedGenerateReqInput
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
OBJECT = {"type": "json_object"}
TEXT_PART = {"type": "text", "text": "What is this?"}


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error, dict)
    return error


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


def logprobs(**fields: Any) -> dict[str, Any]:
    return {"text": "a", "return_logprob": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", **fields}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def calls(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (GENERATE, {}, ["text", "input_ids"]),
        (GENERATE, {"text": "a", "image_data": "x"}, ["image_data", "serves text alone"]),
        (GENERATE, {"text": "a", "video_data": ["x"]}, ["video_data", "serves text alone"]),
        (GENERATE, {"text": "a", "input_ids": [1]}, ["text", "input_ids"]),
        (GENERATE, {"text": ""}, ["text", "empty"]),
        (GENERATE, {"text": 1}, ["text", "str"]),
        (GENERATE, {"text": []}, ["text", "prompts"]),
        (GENERATE, {"text": ["a", ""]}, ["text[1]", "empty"]),
        (GENERATE, {"input_ids": []}, ["input_ids", "empty"]),
        (GENERATE, {"input_ids": [[1], []]}, ["input_ids[1]", "empty"]),
        (GENERATE, {"input_ids": [1, "x"]}, ["input_ids[1]", "str"]),
        (GENERATE, {"input_ids": [1, [2]]}, ["input_ids"]),
        (GENERATE, {"input_ids": [[1], 2]}, ["input_ids[1]"]),
        (GENERATE, {"input_ids": [1.5]}, ["input_ids[0]", "float"]),
        (GENERATE, {"input_ids": [-1]}, ["input_ids", "-1", "no vocabulary"]),
        (GENERATE, {"input_ids": [260]}, ["input_ids", "260", "259"]),
        (GENERATE, {"input_ids": [10**30]}, ["input_ids", "no vocabulary"]),
        (GENERATE, {"input_ids": [-1, [1]]}, ["input_ids", "-1"]),
        (GENERATE, {"input_ids": [[1], [2**32]]}, ["input_ids[1]", str(2**32)]),
        (COMPLETIONS, {"prompt": [1, -2]}, ["prompt", "-2"]),
        (GENERATE, {"input_ids": [1] * CONTEXT_LEN}, ["input_ids", "200 tokens", "199"]),
        (GENERATE, {"text": "a" * CONTEXT_LEN}, ["text", "--context-length"]),
        (GENERATE, {"txet": "a"}, ["txet", "did you mean text"]),
        (GENERATE, {"text": "a", "zzz": 1}, ["zzz", "unknown"]),
        (GENERATE, {"text": "a", "": 1}, ["'': unknown"]),
        (CHAT, chat(model="x" * 5000), ["model has 5000", "4096"]),
        (COMPLETIONS, completion(model="x" * 5000), ["model has 5000", "4096"]),
        (GENERATE, {"text": "a", "stream": "yes"}, ["stream", "bool"]),
        (GENERATE, {"text": "a", "sampling_params": [{}]}, ["sampling_params"]),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, ["sampling_params", "2"]),
        (GENERATE, {"text": "a", "rid": ""}, ["rid"]),
        (GENERATE, {"text": "a", "rid": "x" * 300}, ["rid", "256"]),
        (GENERATE, {"text": "a", "rid": "x\n[12:00:00] C a line of mine"}, ["rid", "printable"]),
        (GENERATE, {"text": ["a", "b"], "rid": ["x", "x"]}, ["rid", "in use"]),
        (GENERATE, {"text": "a", "rid": "HEALTH_CHECK_mine"}, ["rid begins with HEALTH_CHECK"]),
        (GENERATE, {"text": ["a", "b"], "rid": ["x", "HEALTH_CHECK"]}, ["rid begins with"]),
        (GENERATE, {"text": ["a", "b"], "rid": "HEALTH_CHECK"}, ["rid begins with"]),
        (CHAT, chat(rid="HEALTH_CHECK"), ["rid begins with"]),
        (COMPLETIONS, completion(rid="HEALTH_CHECK"), ["rid begins with"]),
        (GENERATE, {"text": "a", "extra_key": "x" * 5000}, ["extra_key", "4096"]),
        (GENERATE, {"text": "a", "cache_salt": 1}, ["cache_salt"]),
        (GENERATE, {"text": "a", "priority": 2**40}, ["priority"]),
        (GENERATE, {"text": "a", "logprob_start_len": 0}, ["logprob_start_len", "return_logprob"]),
        (GENERATE, {"text": "a", "top_logprobs_num": 2}, ["top_logprobs_num", "return_logprob"]),
        (GENERATE, {"text": "a", "return_text_in_logprobs": True}, ["return_text", "needs"]),
        (GENERATE, logprobs(logprob_start_len=1), ["logprob_start_len=1", "from 0 to 0"]),
        (GENERATE, logprobs(logprob_start_len=-2), ["logprob_start_len=-2"]),
        (GENERATE, logprobs(top_logprobs_num=-1), ["top_logprobs_num=-1"]),
        (GENERATE, {"text": "a", "bootstrap_room": 1}, ["bootstrap_room"]),
        (GENERATE, {"text": "a", "lora_path": "x"}, ["lora_path", "SGLang has LoRA"]),
        (GENERATE, sampling(max_new_tokens=-1), ["max_new_tokens"]),
        (GENERATE, sampling(max_new_tokens="8"), ["sampling_params.max_new_tokens", "int"]),
        (
            GENERATE,
            {"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": -1}]},
            ["sampling_params[1].max_new_tokens=-1 must"],
        ),
        (GENERATE, sampling(max_new_tokens=200), ["sampling_params.max_new_tokens", "199"]),
        (GENERATE, sampling(max_new_tokens=10**40), ["max_new_tokens"]),
        (GENERATE, sampling(min_new_tokens=-1), ["min_new_tokens"]),
        (GENERATE, sampling(min_new_tokens=200), ["min_new_tokens=200", "at most 199"]),
        (GENERATE, sampling(min_new_tokens=9, max_new_tokens=8), ["min_new_tokens=9"]),
        (
            GENERATE,
            sampling(stop_regex="("),
            ["stop_regex[0] is not a regular expression", "missing )"],
        ),
        (GENERATE, sampling(stop_regex=["a", "b*"]), ["stop_regex[1] matches the empty text"]),
        (GENERATE, sampling(stop_regex=["a"] * 9), ["stop_regex has 9 patterns, at most 8"]),
        (GENERATE, sampling(stop_regex="a" * 513), ["stop_regex has 513 characters, at most 512"]),
        (GENERATE, sampling(stop_regex="(?r)a"), ["stop_regex[0] searches backwards"]),
        (GENERATE, sampling(stop_regex="(?x)a # b"), ["stop_regex[0] uses a mode"]),
        (
            GENERATE,
            sampling(stop_regex="(((a){9}){9}){9}"),
            ["stop_regex[0] has 2110 parts", "1024"],
        ),
        (
            GENERATE,
            {"text": ["a"] * 65, "sampling_params": [{"stop_regex": f"x{n}"} for n in range(65)]},
            ["stop_regex", "65 different patterns, at most 64"],
        ),
        (
            GENERATE,
            logprobs(
                logprob_start_len=0,
                top_logprobs_num=128,
                text="a" * 100,
                sampling_params={"n": 64},
            ),
            ["text asks for 12900 logprobs", "in each of 64 outputs", "at most 524288"],
        ),
        (COMPLETIONS, {"prompt": ["a" * 190] * 1000, "echo": True, "logprobs": 5}, ["prompt["]),
        (
            GENERATE,
            sampling(structural_tag="{}", regex="a"),
            ["regex and structural_tag are given together"],
        ),
        (GENERATE, sampling(no_stop_trim="x"), ["sampling_params.no_stop_trim", "bool"]),
        (GENERATE, sampling(temperature=-0.1), ["temperature"]),
        (GENERATE, sampling(top_p=0), ["top_p"]),
        (GENERATE, sampling(top_p=1.1), ["top_p"]),
        (GENERATE, sampling(top_k=0), ["top_k"]),
        (GENERATE, sampling(min_p=2), ["min_p"]),
        (GENERATE, sampling(frequency_penalty=3), ["frequency_penalty"]),
        (GENERATE, sampling(presence_penalty=-3), ["presence_penalty"]),
        (GENERATE, sampling(repetition_penalty=0), ["repetition_penalty"]),
        (GENERATE, sampling(stop=[1]), ["sampling_params.stop[0]"]),
        (GENERATE, sampling(stop=["x"] * 99), ["stop", "64"]),
        (GENERATE, sampling(stop=""), ["stop is empty", "leave it out"]),
        (GENERATE, sampling(stop=["a", ""]), ["stop[1] is empty"]),
        (CHAT, chat(stop=""), ["stop is empty"]),
        (COMPLETIONS, completion(stop=["a", ""]), ["stop[1] is empty"]),
        (GENERATE, sampling(stop_token_ids=[999]), ["stop_token_ids", "999"]),
        (GENERATE, sampling(stop_token_ids=[-1]), ["stop_token_ids", "-1"]),
        (GENERATE, sampling(stop_token_ids=[1] * 5000), ["stop_token_ids", "4096"]),
        (GENERATE, sampling(sampling_seed=-1), ["sampling_seed"]),
        (GENERATE, sampling(logit_bias={"x": 1}), ["logit_bias"]),
        (GENERATE, sampling(logit_bias={"999": 1}), ["logit_bias", "999"]),
        (GENERATE, sampling(logit_bias={"0" * 20 + "999": 1}), ["logit_bias", "zeros"]),
        (GENERATE, sampling(n=129), ["n=129", "128"]),
        (GENERATE, sampling(temprature=1), ["sampling_params.temprature", "temperature"]),
        (CHAT, {}, ["messages", "required"]),
        (CHAT, {"messages": []}, ["messages", "empty"]),
        (CHAT, {"messages": [{"content": "a"}]}, ["messages[0].role", "required"]),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, ["messages[0].content"]),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, ["messages[0].content"]),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, ["messages[0].role", "robot"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ["messages[0].content[0].type='image_url'", "this server serves text alone"],
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "video_url"}]}]},
            ["messages[0].content[1].type='video_url'", "this server serves text alone"],
        ),
        (CHAT, chat(max_tokens=0), ["max_tokens"]),
        (CHAT, chat(max_completion_tokens=1000), ["max_completion_tokens", "at most"]),
        (CHAT, chat(max_completion_tokens=3, max_tokens=4), ["max_tokens=4", "send one"]),
        (CHAT, chat(temperature=3), ["temperature", "2"]),
        (CHAT, chat(top_logprobs=3), ["top_logprobs", "logprobs"]),
        (CHAT, chat(logprobs=True, top_logprobs=99), ["top_logprobs", "20"]),
        (CHAT, chat(seed=2**70), ["seed"]),
        *(
            (CHAT, {"messages": [*HELLO, calls(nested(800))]}, ["messages", "nested"])
            # Later Pythons write such a text: their C code has a limit of its own.
            for _ in range(sys.version_info < (3, 12))
        ),
        (CHAT, chat(stop_regex="["), ["stop_regex[0] is not a regular expression"]),
        (CHAT, chat(n=0), ["n=0"]),
        (CHAT, chat(stream_options={"include_uses": True}), ["stream_options.include_uses"]),
        (CHAT, chat(continue_final_message=True), ["continue_final_message", "assistant"]),
        (CHAT, chat(chat_template_kwargs={"tokenize": True}), ["chat_template_kwargs.tokenize"]),
        (CHAT, chat(response_format=OBJECT, json_schema="{}"), ["json_schema contradicts resp"]),
        (CHAT, chat(response_format=OBJECT, regex="a"), ["regex contradicts response_format"]),
        (COMPLETIONS, completion(response_format=OBJECT, ebnf="x"), ["ebnf contradicts response"]),
        (CHAT, chat(mesages=[]), ["mesages", "did you mean messages"]),
        (COMPLETIONS, {}, ["prompt", "required"]),
        (COMPLETIONS, {"prompt": ""}, ["prompt", "empty"]),
        (COMPLETIONS, {"prompt": []}, ["prompt", "empty"]),
        (COMPLETIONS, {"prompt": [1, "a"]}, ["prompt", "mixed"]),
        (COMPLETIONS, {"prompt": [[1], [999]]}, ["prompt[1]", "999"]),
        (COMPLETIONS, completion(max_tokens=-1), ["max_tokens"]),
        (COMPLETIONS, completion(max_tokens=1000), ["max_tokens", "at most 195"]),
        (COMPLETIONS, completion(suffix="x"), ["suffix"]),
        (COMPLETIONS, completion(best_of=2), ["best_of"]),
        (COMPLETIONS, completion(logprobs=6), ["logprobs", "5"]),
        ("/abort_request", {}, ["rid", "abort_all"]),
        ("/v1/tokenize", {"prompt": 1}, ["prompt"]),
        ("/v1/detokenize", {"tokens": [999]}, ["tokens", "999"]),
    ],
)
def test_every_error_names_its_field(
    client: httpx.Client, path: str, body: dict[str, Any], names: list[str]
) -> None:
    error = refused(client.post(path, json=body))
    for name in names:
        assert name in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, {"text": "a" * 5000}, "text"),
        (COMPLETIONS, {"prompt": "a" * 5000, "n": 2}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
    ],
)
def test_a_long_text_that_does_not_fit_is_a_plain_error(
    server: FrontServer,
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    field: str,
    stream: bool,
) -> None:
    error = refused(client.post(path, json={**body, "stream": stream}))
    assert error["message"].startswith(f"{field} has 50")
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert wait_until(lambda: server.context.manager.num_requests == 0, 30)


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        (HELLO * (CONTEXT_LEN + 1), "201 messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 101}] * 2, "202 parts"),
    ],
)
def test_more_messages_than_fit_are_not_rendered(
    server: FrontServer,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[Any],
    count: str,
) -> None:
    rendered: list[Any] = []

    def note(turns: Any, **_: Any) -> str:
        rendered.append(turns)
        return "a"

    monkeypatch.setattr(server.context.chat_template, "render", note)
    error = refused(client.post(CHAT, json=chat(messages=messages)))
    assert count in error["message"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert rendered == []


@pytest.mark.parametrize("where", ["top", "sampling_params"])
def test_a_field_whose_name_is_megabytes_long_is_named_in_short(
    client: httpx.Client, where: str
) -> None:
    field = {"n" * (4 << 20): 1}
    body = {"text": "a", **field} if where == "top" else {"text": "a", where: field}
    error = refused(client.post(GENERATE, json=body))
    assert error["message"].startswith(("n" * 64 + "...: unknown", f"{where}.{'n' * 64}..."))
    assert len(error["message"]) < 200
    assert len(error["param"]) < 100


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"text": "a"} x', "JSON"),
        (b'{"text": "a", "top_logprobs_num": NaN}', "JSON"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b'{"text": "\\ud800"}', "JSON"),
        (b"[]", "object"),
        (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "sampling_params"),
        (b'{"text": "a", "sampling_params": {"temperature": Infinity}}', "JSON"),
        (b'{"text": "a", "image_data": ' + b"[" * 100_000, ""),
    ],
)
def test_malformed_bodies_are_refused(client: httpx.Client, body: bytes, words: str) -> None:
    for path in (GENERATE, CHAT, COMPLETIONS):
        if path == GENERATE or b"text" not in body:
            assert words in refused(client.post(path, content=body))["message"]


def test_large_bodies_are_refused_by_their_announced_length(client: httpx.Client) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    error = refused(client.post(GENERATE, content=body), 413)
    assert str(MAX_BODY_BYTES) in error["message"]


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, DISCARD_BYTES])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_sees_why(
    server: FrontServer, size: int, chunked: bool
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        body = iter([b" " * size]) if chunked else b" " * size
        connection.request("POST", GENERATE, body, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert str(MAX_BODY_BYTES) in json.load(answer)["error"]["message"]


def test_large_bodies_are_refused_while_they_come(client: httpx.Client) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 20
            yield b" " * (1 << 20)

    # The server may hang up before the client has sent everything.
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        refused(client.post(GENERATE, content=endless()), 413)
    assert sent < 1000 << 20


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/generate/", "/health_generate/"])
def test_a_path_with_a_slash_is_no_redirect(client: httpx.Client, path: str) -> None:
    # A redirect would lead to the address in the client's own Host header.
    answer = client.get(path, headers={"Host": "other.example"}, follow_redirects=False)
    assert "location" not in answer.headers
    refused(answer, 404)


def test_wrong_methods_and_paths_name_the_right_ones(client: httpx.Client) -> None:
    assert "GET /flush_cache" in refused(client.get("/flush_cache"), 405)["message"]
    message = refused(client.get("/nowhere"), 404)["message"]
    assert message == "GET /nowhere: Not Found; GET /openapi.json lists the paths"
    for path, meant in (
        ("/generat", GENERATE),
        ("/v1/chat/completion", CHAT),
        ("/generate/", GENERATE),
    ):
        message = refused(client.post(path, json={}), 404)["message"]
        assert message == f"POST {path}: Not Found; did you mean {meant}?"
    assert "mean" not in refused(client.get("/admin/login.php"), 404)["message"]
    assert refused(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (GENERATE, "POST, PUT"),
        (CHAT, "POST"),
        ("/flush_cache", "POST"),
        ("/hicache/storage-backend", "DELETE, GET, HEAD, PUT"),  # three endpoints
        ("/hicache/storage-backend/clear", "POST"),
        ("/v1/models/any", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_all_that_the_path_has(
    client: httpx.Client, path: str, allowed: str
) -> None:
    response = client.patch(path)
    message = refused(response, 405)["message"]
    assert message == f"PATCH {path}: Method Not Allowed; this path takes {allowed}"
    assert response.headers["allow"] == allowed
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
        if method not in allowed.split(", "):
            assert client.request(method, path).headers["allow"] == allowed


@pytest.mark.parametrize("query", ["timeout=x", "timeout=-1", "timeout=nan", "timeout=1e9"])
def test_flush_names_its_parameter(client: httpx.Client, query: str) -> None:
    assert "timeout" in refused(client.post(f"/flush_cache?{query}"))["message"]


def test_param_is_the_field_for_programs(client: httpx.Client) -> None:
    error = refused(client.post(COMPLETIONS, json=completion(max_tokens=1000)))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert refused(client.post(GENERATE, json=sampling(top_p=0)))["param"] == "top_p"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_keeps_its_status(
    server: FrontServer, client: httpx.Client, stream: bool
) -> None:
    server.scheduler.refuse_with = FinishReason(type="abort", message="never fits", status_code=400)
    try:
        for path, body in ((GENERATE, {"text": "a"}), (CHAT, chat()), (COMPLETIONS, completion())):
            response = client.post(path, json={**body, "stream": stream})
            assert refused(response)["message"] == "never fits"
    finally:
        server.scheduler.refuse_with = None


def test_what_a_chat_template_cannot_compute_is_the_clients(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ 10 // x }}{% for i in range(x) %}.{% endfor %}{{ x.bit_length() }}")
    with (
        front_server(chat_template=str(template)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        values: list[object] = [0, False, 2**63, 10**30, 1e308, 1.5, "a", None, [], {"a": 1}]
        for value in values:
            error = refused(client.post(CHAT, json=chat(chat_template_kwargs={"x": value})))
            assert "the chat template refuses them: " in error["message"]
        assert client.post(CHAT, json=chat(chat_template_kwargs={"x": 3})).status_code == 200


def test_an_internal_error_announces_that_the_connection_ends(
    server: FrontServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(server.context.manager.encoder, "encode", fail)
    host = server.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=20)) as connection:
        connection.request("POST", "/v1/tokenize", '{"prompt": "a"}')
        answer = connection.getresponse()
        assert (answer.status, answer.headers["connection"]) == (500, "close")
        error = json.load(answer)["error"]
        assert error["type"] == "server_error"
        assert "mistake" not in error["message"]
        # The same client goes on, on a new connection.
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


def test_refused_requests_never_reach_the_scheduler(
    server: FrontServer, client: httpx.Client
) -> None:
    before = len(server.scheduler.received)
    refused(client.post(GENERATE, content=json.dumps(sampling(top_p=0)).encode()))
    assert not [
        m for m in server.scheduler.received[before:] if isinstance(m, TokenizedGenerateReqInput)
    ]
    assert server.context.manager.num_requests == 0
    assert client.post(GENERATE, json={"text": "ok"}).status_code == 200

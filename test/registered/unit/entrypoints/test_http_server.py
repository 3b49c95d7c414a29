"""The endpoints on an engine that echoes: shapes, streams, aborts."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import CONTEXT_LEN, FrontServer, byte_tokenizer, front_server
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.http.application import Application, Route
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import (
    AbortReq,
    Message,
    TokenizedGenerateReqInput,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

MOST_COMPARED = 1
"""Comparisons of a request with the routes, for its key and for its endpoint."""
HELLO_IDS = byte_tokenizer().encode("hello", add_special_tokens=False)


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(enable_metrics=True) as running:
        yield running


@contextmanager
def asking(server: FrontServer, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that has sent a request, and leaves at the end of the block without an answer."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    with closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"],
)
def test_a_prompt_is_compared_with_few_routes(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    compared: list[str] = []
    routes_at = Application.routes_at

    def note(app: Application, path: str) -> Mapping[str, Route]:
        compared.append(path)
        return routes_at(app, path)

    monkeypatch.setattr(Application, "routes_at", note)
    assert client.post(path, json={}).status_code == 400
    assert compared[-1] == path
    assert len(compared) <= MOST_COMPARED, compared


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The stream's objects; its last line must be the end mark."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _contains(messages: list[Message], wanted: Message) -> bool:
    return wanted in messages


def last_request(server: FrontServer) -> TokenizedGenerateReqInput:
    return server.requests[-1]


def test_logprobs_begin_where_the_prompt_asks(client: httpx.Client) -> None:
    body = {
        "text": "abc",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": [1],
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    assert client.post("/generate", json=body).status_code == 400, "a list needs a batch"
    meta = client.post("/generate", json={**body, "logprob_start_len": 1}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 65, "b"], [-66.0, 66, "c"]]
    assert meta["input_top_logprobs"] == [None, [[-66.0, 66, "c"]]]
    assert meta["output_token_logprobs"] == [[-64.0, 64, "a"], [-65.0, 65, "b"]]
    meta = client.post("/generate", json={**body, "logprob_start_len": -1}).json()["meta_info"]
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])


def test_generate_answers_with_everything(client: httpx.Client) -> None:
    answer = generate(client, text="hello", sampling_params={"max_new_tokens": 8}, rid="mine")
    assert answer["text"] == "hellohel"
    assert answer["output_ids"] == (HELLO_IDS * 2)[:8]
    meta = answer["meta_info"]
    assert meta["e2e_latency"] > 0
    expected = {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 8},
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "cached_tokens": 3,
        "cached_tokens_details": {
            "device": 1,
            "host": 0,
            "storage": 2,
            "storage_backend": "HiCacheFile",
        },
    }
    assert {name: meta[name] for name in expected} == expected
    assert "output_token_logprobs" not in meta


def test_token_ids_equal_text(client: httpx.Client) -> None:
    params = {"max_new_tokens": 8}
    by_ids = generate(client, input_ids=HELLO_IDS, sampling_params=params)
    assert by_ids["text"] == "hellohel"


def test_logprobs_are_triples(client: httpx.Client) -> None:
    first = HELLO_IDS[0]
    body: dict[str, Any] = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    meta = generate(client, **body)["meta_info"]
    assert meta["output_token_logprobs"][0] == [-first, first, None]
    assert meta["output_top_logprobs"][0] == [[-first, first, None], [-999.0, 0, None]]
    assert meta["input_token_logprobs"] == []
    meta = generate(client, **body, return_text_in_logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"][0] == [-first, first, "h"]
    streamed = events(client, "/generate", body)
    assert [len(e["meta_info"]["output_token_logprobs"]) for e in streamed][-1] == 2


def test_no_logprobs_is_a_word_about_all_their_fields(client: httpx.Client) -> None:
    answer = generate(
        client, text="a", return_logprob=False, logprob_start_len=0, top_logprobs_num=2,
        return_text_in_logprobs=True, sampling_params={"max_new_tokens": 1, "stop_regex": []},
    )  # fmt: skip
    assert not [name for name in answer["meta_info"] if "logprob" in name]
    first, second = generate(
        client, text=["a", "b"], return_logprob=[True, False], top_logprobs_num=1,
        logprob_start_len=0, sampling_params={"max_new_tokens": 1},
    )  # fmt: skip
    assert len(first["meta_info"]["input_token_logprobs"]) == 1
    assert "output_token_logprobs" not in second["meta_info"]


def test_one_rid_twice_in_a_body_is_said(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": ["a", "b"], "rid": ["x", "x"]})
    assert answer.status_code == 400 and "in use by another prompt of the body" in answer.text


def test_streams_are_cumulative(client: httpx.Client) -> None:
    body = {"text": "hé", "sampling_params": {"max_new_tokens": 6}}
    answers = events(client, "/generate", body)
    texts = [answer["text"] for answer in answers]
    assert texts[-1] == "héhé"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert [a["meta_info"]["finish_reason"] is None for a in answers[:-1]] == [True] * (
        len(answers) - 1
    )
    assert answers[-1]["meta_info"]["completion_tokens"] == len(answers[-1]["output_ids"]) == 6


def test_batches_keep_their_order(client: httpx.Client) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    answers = generate(client, text=["ab", "cd"], sampling_params=params, rid=["x", "y"])
    assert [a["text"] for a in answers] == ["a", "cd"]
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y"]
    ids = generate(client, input_ids=[[65], [66]], sampling_params={"max_new_tokens": 1})
    assert [a["output_ids"] for a in ids] == [[65], [66]]


def test_batches_stream_with_an_index(client: httpx.Client) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 2}}
    last = {event["index"]: event["text"] for event in events(client, "/generate", body)}
    assert last == {0: "ab", 1: "cd"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_trimmed_unless_asked_for(client: httpx.Client, stream: bool) -> None:
    for keep, text in ((False, "he"), (True, "hell")):
        for body in (
            {"text": "hello", "sampling_params": {"stop": "ll"}, "no_stop_trim": keep},
            {"text": "hello", "sampling_params": {"stop": "ll", "no_stop_trim": keep}},
        ):
            answer = events(client, "/generate", body)[-1] if stream else generate(client, **body)
            assert answer["text"] == text
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ll"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_patterns_are_trimmed_unless_asked_for(client: httpx.Client, stream: bool) -> None:
    pattern = "l+o|z"
    for keep, text in ((False, "he"), (True, "hello")):
        params = {"stop_regex": pattern, "no_stop_trim": keep}
        body = {"text": "hello", "sampling_params": params}
        answers = events(client, "/generate", body) if stream else [generate(client, **body)]
        assert answers[-1]["text"] == text
        assert answers[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        assert keep or all(text.startswith(answer["text"]) for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_patterns_of_openai_bodies(client: httpx.Client, stream: bool) -> None:
    body = {"prompt": "hello", "stop_regex": ["[0-9]", "l+o"], "stop": "zz", "max_tokens": 50}
    if stream:
        choices = [event["choices"][0] for event in events(client, "/v1/completions", body)]
    else:
        choices = client.post("/v1/completions", json=body).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "he"
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", "l+o")


def test_stop_tokens_are_trimmed_unless_asked_for(client: httpx.Client) -> None:
    for keep, text in ((False, "he"), (True, "hel")):
        params = {"stop_token_ids": [HELLO_IDS[2]]}
        answer = generate(client, text="hello", sampling_params=params, no_stop_trim=keep)
        assert answer["text"] == text
        assert answer["output_ids"] == HELLO_IDS[:3]


def test_default_number_of_tokens_shrinks_to_the_room(client: httpx.Client) -> None:
    assert len(generate(client, text="a")["output_ids"]) == 128
    assert len(generate(client, text="a" * 150)["output_ids"]) == CONTEXT_LEN - 150


def test_a_least_number_of_tokens_raises_the_default(client: httpx.Client) -> None:
    answer = generate(client, text="a", sampling_params={"min_new_tokens": 150})
    assert len(answer["output_ids"]) == 150
    body = {"messages": [{"role": "user", "content": "a"}], "min_tokens": 150}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_long_texts_are_encoded_elsewhere_and_alike(server: FrontServer) -> None:
    text = "hé" * 4000
    response = httpx.post(f"{server.url}/v1/tokenize", json={"prompt": text})
    assert response.json()["tokens"] == byte_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("path", "field"), [("/generate", "text"), ("/v1/tokenize", "prompt")])
def test_a_client_that_leaves_is_not_tokenized_for(
    server: FrontServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    encoder = server.context.manager.encoder
    gate, begun = threading.Event(), list[str]()

    def slow(text: str, add_special_tokens: bool) -> list[int]:
        begun.append(text)
        assert gate.wait(20)
        return [65]

    monkeypatch.setattr(encoder, "_far", slow)
    try:
        for letter in "ab":
            with asking(server, path, {field: letter * 5000}):
                assert wait_until(lambda: bool(encoder._in_flight), 20)
                assert wait_until(lambda: begun == ["a" * 5000], 20)
            assert wait_until(lambda: not encoder._in_flight, 20)
    finally:
        gate.set()
    assert httpx.post(f"{server.url}{path}", json={field: "c" * 5000}).status_code == 200
    assert begun == ["a" * 5000, "c" * 5000]


def test_the_scheduler_gets_what_was_asked(server: FrontServer, client: httpx.Client) -> None:
    params = {"max_new_tokens": 1, "temperature": 0, "sampling_seed": 7, "top_k": 10**30}
    generate(client, text="a", sampling_params=params, extra_key="k", cache_salt="s", priority=3)
    message = last_request(server)
    assert (message.seed, message.extra_key, message.priority) == (7, "e1:ks1:s", 3)
    assert message.sampling_params.is_greedy
    generate(client, text="a", sampling_params={"max_new_tokens": 1, "top_k": 10**30})
    assert last_request(server).sampling_params.top_k == -1
    seeds = set()
    for _ in range(3):
        generate(client, text="a", sampling_params={"max_new_tokens": 1, "stop": None})
        seeds.add(last_request(server).seed)
    assert len(seeds) == 3
    assert last_request(server).extra_key is None


def test_a_request_id_in_use_is_refused(server: FrontServer, client: httpx.Client) -> None:
    server.scheduler.hold.set()
    thread = threading.Thread(target=generate, args=(client,), kwargs={"text": "a", "rid": "dup"})
    thread.start()
    try:
        assert wait_until(lambda: "dup" in server.scheduler.running, 30)
        response = httpx.post(f"{server.url}/generate", json={"text": "b", "rid": "dup"})
        assert response.status_code == 400
        assert "rid" in response.json()["error"]["message"]
    finally:
        server.scheduler.hold.clear()
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_aborts_its_request(
    server: FrontServer, path: str, stream: bool
) -> None:
    rid = f"leaves-{path}-{stream}"
    prompts: dict[str, dict[str, Any]] = {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    server.scheduler.hold.set()
    try:
        body = {**prompts[path], "rid": rid, "stream": stream}
        with asking(server, path, body):
            assert wait_until(lambda: rid in server.scheduler.running, 20)
        aborted = AbortReq(rid=rid)
        assert wait_until(lambda: aborted in server.scheduler.received, 30)
        assert wait_until(lambda: rid not in server.scheduler.running, 30)
        assert wait_until(lambda: server.context.manager.num_requests == 0, 30)
    finally:
        server.scheduler.hold.clear()


def test_a_client_that_leaves_in_mid_stream_aborts_its_request(server: FrontServer) -> None:
    rids = ["m1", "m2", "m3"]
    body = {"input_ids": [[65] * 5] * 3, "stream": True, "rid": rids}
    server.scheduler.hold_after = 2
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=20) as response:
        next(response.iter_lines())
    try:
        for rid in rids:
            aborted = AbortReq(rid=rid)
            received = server.scheduler.received
            assert wait_until(partial(_contains, received, aborted), 30)
        assert wait_until(lambda: server.context.manager.num_requests == 0, 30)
    finally:
        server.scheduler.hold_after = None
    assert wait_until(lambda: not server.scheduler.running, 30)
    again = httpx.post(f"{server.url}/generate", json={"text": "a", "rid": "m1"}, timeout=20)
    assert again.status_code == 200


@pytest.mark.parametrize("body", [{"rid": "victim"}, {"abort_all": True}])
def test_abort_ends_a_request_with_what_it_has(
    server: FrontServer, client: httpx.Client, body: dict[str, Any]
) -> None:
    server.scheduler.hold.set()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(generate(client, text="a", rid="victim"))
    )
    thread.start()
    try:
        assert wait_until(lambda: "victim" in server.scheduler.running, 30)
        assert httpx.post(f"{server.url}/abort_request", json=body).status_code == 200
        thread.join(30)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        server.scheduler.hold.clear()
        thread.join()


def test_long_conversations_are_rendered_elsewhere(
    server: FrontServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_chat, "MESSAGES_AT_ONCE", 2)
    threads: list[str] = []
    template = server.context.chat_template
    render = template.render

    def noted(*args: Any, **fields: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*args, **fields)

    monkeypatch.setattr(template, "render", noted)
    for count in (2, 3):
        body = {"messages": [{"role": "user", "content": "a"}] * count, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert threads == ["front-server", "render_0"]
    wrong = {"messages": [{"role": "robot", "content": "a"}] * 3}
    assert client.post("/v1/chat/completions", json=wrong).status_code == 400


def test_metrics_sum_those_of_both_processes(client: httpx.Client) -> None:
    before = client.get("/metrics").text
    events(client, "/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}})
    text = client.get("/metrics").text
    assert "sglang:num_running_reqs 0.0" in text

    def sample(name: str, where: str) -> float:
        lines = [line for line in where.splitlines() if line.startswith(name + " ")]
        return float(lines[0].split()[-1]) if lines else 0.0

    for name, more in (
        ("sglang:time_to_first_token_seconds_count", 1),
        ("sglang:inter_token_latency_seconds_count", 2),
        ("sglang:e2e_request_latency_seconds_count", 1),
        ('sglang:num_requests_total{finish_reason="length"}', 1),
    ):
        assert sample(name, text) == sample(name, before) + more, name


def test_tokens_of_batches_give_their_texts_back(client: httpx.Client) -> None:
    reply = client.post("/v1/tokenize", json={"prompt": ["hé", "a"]}).json()
    assert (reply["count"], reply["max_model_len"]) == ([3, 1], CONTEXT_LEN)
    assert client.post("/v1/detokenize", json=reply).status_code == 400
    back = client.post("/v1/detokenize", json={"tokens": reply["tokens"]}).json()
    assert back == {"text": ["hé", "a"]}


def test_tokenize_counts_a_conversation_as_a_chat_does(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ reasoning_effort }}"
        "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}",
        encoding="utf-8",
    )
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
    hello = [{"role": "user", "content": "hello"}]
    with (
        front_server(chat_template=str(template), tool_call_parser="qwen25") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for more, count in (
            ({}, 5),
            ({"reasoning_effort": "low"}, 8),
            ({"tools": tools}, 15),
            ({"tools": tools, "tool_choice": "required"}, 15),
            ({"tools": tools, "tool_choice": "none"}, 5),
        ):
            body = {"messages": hello, **more}
            assert client.post("/v1/tokenize", json=body).json()["count"] == count
            chat = client.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
            assert chat["usage"]["prompt_tokens"] == count
        for wrong, field in (
            ({"messages": hello, "tool_choice": "required"}, "tool_choice"),
            ({"messages": hello, "tools": tools * 2}, "tools"),
            ({"prompt": "hello", "tools": tools}, "tools"),
            ({"prompt": "hello", "add_generation_prompt": True}, "add_generation_prompt"),
        ):
            refusal = client.post("/v1/tokenize", json=wrong)
            assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, field)
        body = {"messages": hello, "tool_choice": "required"}
        message = client.post("/v1/tokenize", json=body).json()["error"]["message"]
        assert message.endswith("there are no tools: send tools, or leave it out")


def test_a_launched_server_has_the_keys_and_its_processes_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "a key")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_SECRET", "a secret of servers")
    started: list[tuple[ServerArgs, str | None]] = []

    def run(args: ServerArgs) -> int:
        started.append((args, envs.SGLANG_DISAGGREGATION_SECRET.get()))
        return 3

    monkeypatch.setattr(http_server, "run_server", run)
    monkeypatch.setattr(http_server, "configure_logger", lambda level, style: None)
    with pytest.raises(SystemExit, match="3"):
        http_server.launch_server(ServerArgs(disaggregation_mode="decode"))
    ((args, in_environment),) = started
    assert (args.api_key, args.disaggregation_secret) == ("a key", "a secret of servers")
    assert in_environment is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1

"""Prefill and decode servers behind the real router: the words of one server, for its clients."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rigs.disaggregation.pd_servers import ServerPair, assert_alike, server_pair
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_NAME
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-b-test-cpu")

FACTS = "The code of heron is 7391. The code of otter is 0042. The code of badger is 5127. "


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerPair]:
    with server_pair() as servers:
        yield servers


@pytest.fixture(scope="module")
def whole() -> Iterator[EngineServer]:
    with ForkedServer("--page-size", "16", *EXACT) as server:
        yield server


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def is_idle(server: EngineServer) -> bool:
    state = server.request("GET", "/server_info").body["internal_states"][0]
    return not state["busy"]


def generate(url: str, **fields: Any) -> Any:
    body = {"text": FACTS, "sampling_params": {"temperature": 0, "max_new_tokens": 24}, **fields}
    return post(url, "/generate", body)


def test_the_openai_client_gets_the_answers_of_a_conversation(pair: ServerPair) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": FACTS}]
    answers = []
    for name in ("heron", "otter", "badger"):
        messages.append({"role": "user", "content": f"What is the code of {name}?"})
        answer = client.chat.completions.create(
            model=BUILTIN_MODEL_NAME, messages=messages, temperature=0
        )
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    assert answers == ["7391", "0042", "5127"]


def test_streams_end_with_the_whole_answer(pair: ServerPair) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none")
    question: Any = [{"role": "user", "content": f"{FACTS} What is the code of otter?"}]
    stream = client.chat.completions.create(
        model=BUILTIN_MODEL_NAME, messages=question, temperature=0, stream=True
    )
    parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(parts) == "0042" and len(parts) > 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "top_logprobs_num": 3},
        {"sampling_params": {"temperature": 0.9, "sampling_seed": 7, "max_new_tokens": 24}},
        {"sampling_params": {"temperature": 0, "max_new_tokens": 24, "stop": ["ok"]}},
        {"sampling_params": {"temperature": 0, "max_new_tokens": 12, "regex": "[0-9 ]{9}"}},
        {"sampling_params": {"temperature": 0, "max_new_tokens": 1}},
    ],
    ids=["greedy", "prompt logprobs", "top logprobs", "seed", "stop", "grammar", "one token"],
)
def test_output_is_that_of_one_server(
    pair: ServerPair, whole: EngineServer, fields: dict[str, Any]
) -> None:
    got, want = generate(pair.url, **fields), generate(whole.url, **fields)
    assert (got["text"], got["output_ids"]) == (want["text"], want["output_ids"])
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
    for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert_alike(got["meta_info"].get(name), want["meta_info"].get(name))


def test_a_batch_has_a_room_for_each_prompt(pair: ServerPair, whole: EngineServer) -> None:
    texts = [FACTS * count + "What is the code of otter?" for count in (1, 3, 9)]
    body = {"model": BUILTIN_MODEL_NAME, "prompt": texts, "temperature": 0, "max_tokens": 24}
    got, want = (post(url, "/v1/completions", body)["choices"] for url in (pair.url, whole.url))
    assert [one["text"] for one in got] == [one["text"] for one in want]


def test_cached_tokens_are_those_of_the_prefill_server(pair: ServerPair) -> None:
    text = "A prompt that nobody has sent before. " * 12
    first = generate(pair.url, text=text)["meta_info"]
    again = generate(pair.url, text=text)["meta_info"]
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == again["prompt_tokens"] // 16 * 16


def test_both_servers_have_given_everything_back(pair: ServerPair) -> None:
    servers = [*pair.prefill, *pair.decode]
    assert wait_until(lambda: all(map(is_idle, servers)), 30)
    for server in servers:
        info = server.request("GET", "/server_info").body["internal_states"][0]
        assert info["free_tokens"] + info["evictable_tokens"] == info["max_total_num_tokens"]


def test_a_request_without_a_room_is_refused(pair: ServerPair) -> None:
    for server in (*pair.prefill, *pair.decode):
        reply = server.request("POST", "/generate", {"text": "hello"})
        assert reply.status == 400 and "bootstrap_room" in str(reply.body)
        assert server.request("GET", "/health_generate").status == 200


def test_both_servers_end_in_order(pair: ServerPair) -> None:
    for server in (*pair.prefill, *pair.decode):
        server.process.send_signal(signal.SIGTERM)
    for server in (*pair.prefill, *pair.decode):
        assert server.process.wait(60) == 0

"""Requests of many kinds to a prefill and a decode server behind the router: as of one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import msgspec
import openai
import pytest

from rigs.disaggregation.pd_servers import ROUTER, ServerPair, assert_alike, server_pair
from rigs.disaggregation.router_rows import ROUTERS
from rigs.servers.engine_server import EXACT, EngineServer, post_and_leave
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_NAME
from sglang.srt.disaggregation.base.bootstrap_route import find
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=11, suite="base-b-test-cpu")

CHUNKS: Final = ("--chunked-prefill-size", "64")
FACTS: Final = (
    "The code of heron is 7391. The code of otter is 2846. The code of badger is 5027. "
    "The code of falcon is 1684. The code of raven is 9310. The code of tiger is 4275. "
)
PROMPTS: Final = (
    "a",
    "The code of heron is 7391. The code of heron is",
    FACTS + "The code of falcon is",
    FACTS * 4 + "The code of raven is",
)
"""Shorter than a page, two pages, chunks."""
IDLE_S: Final = 60.0


def state_of(server: EngineServer) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", "/server_info").body["internal_states"][0]
    return found


def is_busy(server: EngineServer) -> bool:
    """True if a request is in a server."""
    return bool(state_of(server)["busy"])


def is_idle(server: EngineServer) -> bool:
    """True if no request is in a server, and all pages are free or in the tree."""
    state = state_of(server)
    return not state["busy"] and state["used_tokens"] == 0


@pytest.fixture(scope="module")
def whole() -> Iterator[EngineServer]:
    with ForkedServer("--page-size", "16", *CHUNKS, *EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerPair]:
    with server_pair(prefill_args=CHUNKS) as servers:
        yield servers


@pytest.fixture(autouse=True)
def the_pair_is_idle_afterwards(pair: ServerPair) -> Iterator[None]:
    yield
    for server in (*pair.prefill, *pair.decode):
        assert wait_until(lambda server=server: is_idle(server), IDLE_S), (  # type: ignore[misc]
            server.request("GET", "/server_info").body["internal_states"]
        )


def client_of(server: EngineServer | ServerPair) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def generate(server: EngineServer | ServerPair, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def question(animal: str) -> list[Any]:
    return [{"role": "user", "content": f"{FACTS}What is the code of {animal}?"}]


def test_output_and_logprobs_are_those_of_one_server(whole: EngineServer, pair: ServerPair) -> None:
    for prompt in PROMPTS:
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        expected, found = generate(whole, **body), generate(pair, **body)
        assert found["output_ids"] == expected["output_ids"]
        assert found["text"] == expected["text"]
        for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
            assert found["meta_info"][name] == expected["meta_info"][name]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert_alike(found["meta_info"][name], expected["meta_info"][name])
        assert found["meta_info"]["input_token_logprobs"] == []


def test_cached_tokens_are_the_prefill_servers(pair: ServerPair) -> None:
    for server in (*pair.prefill, *pair.decode):
        server.flush()
    prompt = f"unseen {FACTS}"
    params = {"temperature": 0, "max_new_tokens": 4}
    first = generate(pair, text=prompt, sampling_params=params)["meta_info"]
    again = generate(pair, text=prompt, sampling_params=params)["meta_info"]
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] >= (again["prompt_tokens"] - 1) // 16 * 16
    for server in pair.decode:
        server.flush()
    only_prefill = generate(pair, text=prompt, sampling_params=params)
    assert only_prefill["meta_info"]["cached_tokens"] == again["cached_tokens"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_samples_are_those_of_one_server(whole: EngineServer, pair: ServerPair, kind: str) -> None:
    """The same seeds draw the same words."""
    words = []
    for server in (whole, pair):
        with client_of(server) as client:
            common: dict[str, Any] = {
                "model": BUILTIN_MODEL_NAME,
                "n": 3,
                "seed": 5,
                "temperature": 1.0,
            }
            if kind == "chat":
                chat = client.chat.completions.create(
                    messages=question("otter"), max_tokens=6, **common
                )
                words.append([one.message.content for one in chat.choices])
            else:
                completion = client.completions.create(
                    prompt=[*PROMPTS[1:3]], max_tokens=6, **common
                )
                words.append([one.text for one in completion.choices])
    assert words[0] == words[1]
    assert len(words[1]) == (3 if kind == "chat" else 6)


def test_a_batch_of_ids_gets_the_words_of_one_server(whole: EngineServer, pair: ServerPair) -> None:
    body = {
        "input_ids": [[65, 66, 67], list(range(40, 90)), [70]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
    }
    expected, found = generate(whole, **body), generate(pair, **body)
    assert [one["output_ids"] for one in found] == [one["output_ids"] for one in expected]


def test_grammars_hold_on_both_servers(pair: ServerPair) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "integer"}},
        "required": ["code"],
    }
    for stop in ({"json_schema": json.dumps(schema)}, {"regex": "[0-9]{4}"}):
        params = {"temperature": 0, "max_new_tokens": 60, **stop}
        found = generate(pair, text=PROMPTS[2], sampling_params=params)
        if "regex" in stop:
            assert found["text"].isdigit()
            assert len(found["text"]) == 4
        elif found["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(found["text"])["code"], int)
        else:
            assert found["text"].lstrip().startswith("{")


def test_many_at_once_get_the_words_of_one_server(whole: EngineServer, pair: ServerPair) -> None:
    bodies = [
        {
            "text": FACTS * (number % 4) + f"The number {number} is",
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 1 + number % 9,
                "ignore_eos": True,
            },
        }
        for number in range(24)
    ]
    expected = [generate(whole, **body)["output_ids"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: generate(pair, **body)["output_ids"], bodies))
    assert found == expected


def test_a_client_that_leaves_ends_it_on_both_servers(pair: ServerPair) -> None:
    body = {
        "text": PROMPTS[1],
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", f"{pair.url}/generate", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["meta_info"]["finish_reason"] is None
        state = pair.decode[0].request("GET", "/server_info").body["internal_states"][0]
        assert state["num_running_reqs"] == 1
    # The fixture waits until both servers are idle; 4000 tokens would take longer.
    assert wait_until(lambda: is_idle(pair.decode[0]), IDLE_S)
    again = generate(pair, text="a", sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert again["meta_info"]["completion_tokens"] == 2


def test_a_connection_to_decode_that_is_closed_ends_the_request_on_prefill(
    pair: ServerPair,
) -> None:
    """`smg` closes no other when its client leaves."""
    (prefill,), (decode,) = pair.prefill, pair.decode
    port = prefill.request("GET", "/server_info").body["disaggregation_bootstrap_port"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 12345}
    body = {"text": PROMPTS[3], "sampling_params": {"max_new_tokens": 4}, **room}
    post_and_leave(decode.url, "/generate", body, lambda: is_busy(decode))
    answer = httpx.post(f"{prefill.url}/generate", json=body, timeout=60)
    assert answer.status_code == 503 and "the decode server gave it up" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_says_why(pair: ServerPair, stream: bool) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 10**6}, "stream": stream}
    answer = httpx.post(f"{pair.url}/generate", json=body, timeout=120)
    assert answer.status_code == 400
    assert "max_new_tokens=1000000 and a prompt of" in answer.text
    lost = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}
    answer = httpx.post(f"{pair.url}/generate", json=lost, timeout=120)
    assert answer.status_code == 400
    assert "logprob_start_len with a stream" in answer.text


def test_servers_and_router_tell_what_they_are(pair: ServerPair) -> None:
    [prefill], [decode] = pair.prefill, pair.decode
    workers = httpx.get(f"{pair.url}/workers", timeout=20).json()["workers"]
    settings = ROUTERS[ROUTER].server_settings
    modes = {one["url"]: one[settings]["disaggregation_mode"] for one in workers}
    assert modes == {prefill.url: "prefill", decode.url: "decode"}
    [port] = [one["bootstrap_port"] for one in workers if "bootstrap_port" in one]
    found = prefill.request("GET", "/server_info").body
    assert found["disaggregation_bootstrap_port"] == port
    secret = DeploymentSecret(pair.secret)
    route = find("127.0.0.1", port, 0, timeout=20.0, secret=secret)
    assert [msgspec.structs.asdict(route)] == found["routes"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    lost = decode.request("POST", "/generate", {"text": "a", **room})
    assert lost.status >= 400
    assert "the bootstrap server at http://127.0.0.1:1" in lost.body["error"]["message"]

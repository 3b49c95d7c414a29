"""Rooms of a prefill and a decode server: how bodies name them, and who takes which request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

import httpx
import pytest

from rigs.servers.engine_server import post_and_leave
from rigs.servers.fake_engine import FrontServer, front_server
from sglang.srt.messages.io_struct import (
    MAX_ROOM,
    Bootstrap,
    DeclineRoomReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
HELLO: Final = {"messages": [{"role": "user", "content": "hello"}]}
ONE: Final = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 7}
TWO: Final = {**ONE, "bootstrap_room": [7, 8]}
PROMPTS: Final[dict[str, dict[str, Any]]] = {
    GENERATE: {"text": "a"},
    CHAT: HELLO,
    COMPLETIONS: {"prompt": "a"},
}
AGENTS: Final[dict[str, dict[str, Any]]] = {
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**HELLO, "max_tokens": 5},
}
"""APIs of agents, whose bodies have no batches."""
SHORT: Final = {"sampling_params": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def decode() -> Iterator[FrontServer]:
    hosts = "10.0.0.0/24, p, q, named:8998"
    with front_server(disaggregation_mode="decode", disaggregation_prefill_hosts=hosts) as running:
        yield running


@pytest.fixture(scope="module")
def prefill() -> Iterator[FrontServer]:
    with front_server(disaggregation_mode="prefill") as running:
        yield running


def post(server: FrontServer, path: str, body: dict[str, Any]) -> httpx.Response:
    server.scheduler.received.clear()
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


def rooms(server: FrontServer, path: str, body: dict[str, Any]) -> list[Bootstrap | None]:
    """The rooms that the scheduler is told of, in the order of the outputs."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    return [
        one.bootstrap
        for one in server.scheduler.received
        if isinstance(one, TokenizedGenerateReqInput)
    ]


def refusal(server: FrontServer, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Field and message of a refusal, of which the scheduler hears that rooms stay empty."""
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    assert all(isinstance(one, DeclineRoomReq) for one in server.scheduler.received)
    error = answer.json()["error"]
    return error["param"], error["message"]


def room(number: int, port: int = 9001, host: str = "10.0.0.1") -> Bootstrap:
    return Bootstrap(host=host, port=port, room=number)


@pytest.mark.parametrize("path", [*PROMPTS, *AGENTS])
def test_one_prompt_has_one_room(decode: FrontServer, prefill: FrontServer, path: str) -> None:
    body = {**PROMPTS, **AGENTS}[path]
    for server in (decode, prefill):
        assert rooms(server, path, {**body, **ONE}) == [room(7)]
    for port in ({"bootstrap_port": None}, {}):
        fields = {"bootstrap_host": "p", "bootstrap_room": MAX_ROOM, **port}
        assert rooms(decode, path, {**body, **fields}) == [room(MAX_ROOM, 8998, "p")]


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        (GENERATE, {"text": ["a", "b"], **SHORT}),
        (GENERATE, {"input_ids": [[1], [2]], **SHORT}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
    ],
)
def test_a_batch_has_a_room_for_each_prompt(
    decode: FrontServer, path: str, prompts: dict[str, Any]
) -> None:
    assert rooms(decode, path, {**prompts, **TWO}) == [room(7), room(8)]
    lists = {
        "bootstrap_host": ["p", "q"],
        "bootstrap_port": [None, 5],
        "bootstrap_room": [0, 1],
    }
    assert rooms(decode, path, {**prompts, **lists}) == [room(0, 8998, "p"), room(1, 5, "q")]


def test_spellings_of_a_host_name_one_prefill_server(prefill: FrontServer) -> None:
    lists = {
        "bootstrap_host": ["P.", "[::FFFF:10.0.0.1]", "fe80:0::1"],
        "bootstrap_port": 5,
        "bootstrap_room": [0, 1, 2],
    }
    told = rooms(prefill, GENERATE, {"input_ids": [[1], [2], [3]], **SHORT, **lists})
    assert told == [room(0, 5, "p"), room(1, 5, "10.0.0.1"), room(2, 5, "fe80::1")]


def test_a_list_of_one_prompt_has_a_list_of_one_room(decode: FrontServer) -> None:
    one = {"bootstrap_host": ["p"], "bootstrap_port": [5], "bootstrap_room": [3]}
    assert rooms(decode, GENERATE, {"input_ids": [[1]], **one}) == [room(3, 5, "p")]
    assert rooms(decode, COMPLETIONS, {"prompt": ["a"], **one}) == [room(3, 5, "p")]


def test_samples_have_rooms_of_their_own(decode: FrontServer, prefill: FrontServer) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "n": 3}, **ONE}
    told = rooms(decode, GENERATE, body)
    assert told == rooms(prefill, GENERATE, body)
    assert told[0] == room(7)
    assert len({one.room for one in told if one is not None}) == 3
    assert rooms(decode, CHAT, {**HELLO, "n": 3, **ONE}) == told
    assert rooms(decode, COMPLETIONS, {"prompt": "a", "n": 3, **ONE}) == told


def test_a_router_names_a_room_for_each_sample_of_a_chat(decode: FrontServer) -> None:
    lists = {"bootstrap_host": ["p"] * 3, "bootstrap_port": [5] * 3, "bootstrap_room": [3, 1, 2]}
    told = rooms(decode, CHAT, {**HELLO, "n": 3, **lists})
    assert told == [room(3, 5, "p"), room(1, 5, "p"), room(2, 5, "p")]
    field, message = refusal(decode, CHAT, {**HELLO, "n": 10**9, **lists})
    assert field == "n", message
    field, message = refusal(decode, CHAT, {**HELLO, "n": 2, **lists})
    assert (field, message[:36]) == ("bootstrap_room", "bootstrap_room has 3 values for 2 ou")


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"bootstrap_host": 5}, "bootstrap_host", "expected str | array | null, got int"),
        ({"bootstrap_host": ""}, "bootstrap_host", "a name or an address"),
        ({"bootstrap_host": "a b"}, "bootstrap_host", "without spaces"),
        ({"bootstrap_host": "a\n"}, "bootstrap_host", "printable"),
        ({"bootstrap_host": "x" * 256}, "bootstrap_host", "1 to 255"),
        ({"bootstrap_host": None}, "bootstrap_host", "bootstrap_host is missing: a request for"),
        ({"bootstrap_port": "5"}, "bootstrap_port", "expected int | array | null, got str"),
        ({"bootstrap_port": 0}, "bootstrap_port", "bootstrap_port=0 must be from 1 to 65535"),
        ({"bootstrap_port": 65536}, "bootstrap_port", "=65536 must be from 1 to 65535"),
        ({"bootstrap_room": None}, "bootstrap_room", "bootstrap_room is missing"),
        ({"bootstrap_room": True}, "bootstrap_room", "expected int | array | null, got bool"),
        ({"bootstrap_room": -1}, "bootstrap_room", "=-1 must be from 0 to 2^63 - 1"),
        ({"bootstrap_room": 2**63}, "bootstrap_room", f"={2**63} must be from 0 to 2^63 - 1"),
        ({"bootstrap_room": []}, "bootstrap_room", ""),
        ({"bootstrap_room": [1, "2"]}, "bootstrap_room[1]", "expected int, got str"),
    ],
)
def test_wrong_values_are_refused_by_name(
    decode: FrontServer, path: str, fields: dict[str, Any], field: str, message: str
) -> None:
    named, told = refusal(decode, path, {**PROMPTS[path], **ONE, **fields})
    assert named == field
    assert message in told
    assert field in told


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        (GENERATE, {"text": "a", **TWO}, "bootstrap_room", "a list needs a batch"),
        (COMPLETIONS, {"prompt": [1, 2], **TWO}, "bootstrap_room", "a list needs a batch"),
        (CHAT, {**HELLO, **ONE, "bootstrap_host": ["p"]}, "bootstrap_host", "needs a batch"),
        (GENERATE, {"text": ["a"] * 3, **TWO}, "bootstrap_room", "2 values for 3 prompts"),
        (
            GENERATE,
            {"text": ["a"] * 2, **TWO, "bootstrap_port": []},
            "bootstrap_port",
            "0 values for 2 prompts",
        ),
        (GENERATE, {"text": ["a"] * 2, **ONE}, "bootstrap_room", "two prompts have the same room"),
        (COMPLETIONS, {"prompt": ["a"] * 2, **ONE}, "bootstrap_room", "the same room"),
        (
            GENERATE,
            {"text": ["a"] * 2, **TWO, "bootstrap_port": [5, 0]},
            "bootstrap_port",
            "bootstrap_port[1]=0 must",
        ),
        (GENERATE, {"text": "a", **ONE, "bootstrap_pair_key": "k"}, "bootstrap_pair_key", "alone"),
    ],
)
def test_rooms_that_do_not_match_the_prompts_are_refused(
    decode: FrontServer, path: str, body: dict[str, Any], field: str, message: str
) -> None:
    named, told = refusal(decode, path, body)
    assert (named, message in told) == (field, True), told


@pytest.mark.parametrize("path", PROMPTS)
def test_each_server_takes_its_own_kind_of_request(
    server: FrontServer, decode: FrontServer, prefill: FrontServer, path: str
) -> None:
    field, message = refusal(server, path, {**PROMPTS[path], **ONE})
    assert field == "bootstrap_room"
    assert "for a pair of a prefill and a decode server" in message
    assert rooms(server, path, PROMPTS[path]) == [None]
    assert rooms(server, path, {**PROMPTS[path], **dict.fromkeys(ONE)}) == [None]
    for server, role in ((decode, "decode"), (prefill, "prefill")):
        field, message = refusal(server, path, PROMPTS[path])
        assert field == "bootstrap_room"
        assert f"this server does the {role} of requests only" in message


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("path", "body", "declined"),
    [
        (GENERATE, {"text": ["a", "b"], "sampling_params": {"top_p": 7}, **TWO}, [7, 8]),
        (GENERATE, {"input_ids": [[1], [10**6]], **SHORT, **TWO}, [7, 8]),
        (CHAT, {**HELLO, "max_tokens": 10**6, **ONE}, [7]),
        (GENERATE, {"text": "a " * 10_000, **SHORT, **ONE}, [7]),
        (GENERATE, {"text": "a", "sampling_params": {"top_p": 7}}, []),
    ],
    ids=["parameters", "tokens", "chat", "a long text", "no room"],
)
def test_who_waits_for_a_refused_request_is_told(
    decode: FrontServer,
    prefill: FrontServer,
    mode: str,
    path: str,
    body: dict[str, Any],
    declined: list[int],
) -> None:
    """The check of the tokens of a long text comes later."""
    server = {"decode": decode, "prefill": prefill}[mode]
    _, message = refusal(server, path, body)
    assert wait_until(lambda: len(server.scheduler.received) == len(declined), 20)
    told = [one for one in server.scheduler.received if isinstance(one, DeclineRoomReq)]
    assert [one.bootstrap for one in told] == [room(number) for number in declined]
    assert all(one.reason == message for one in told)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_who_waits_is_told_of_a_client_that_leaves_during_tokenization(
    decode: FrontServer, prefill: FrontServer, mode: str
) -> None:
    """The other server would wait for a room that nobody knows."""
    server = {"decode": decode, "prefill": prefill}[mode]
    server.scheduler.received.clear()
    body = {"text": "a " * 4_000, **SHORT, **ONE, "rid": "leaves"}
    begun = threading.Event()

    async def encode(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.sleep(20)

    with patch.object(server.context.manager.encoder, "encode", encode):
        post_and_leave(server.url, GENERATE, body, begun.is_set)
        assert wait_until(lambda: bool(server.scheduler.received), 20)
    (told,) = server.scheduler.received
    assert isinstance(told, DeclineRoomReq) and told.bootstrap == room(7)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_who_waits_is_told_of_an_id_in_use(
    decode: FrontServer, prefill: FrontServer, mode: str
) -> None:
    """A router repeats a request with its id, and a new room."""
    server = {"decode": decode, "prefill": prefill}[mode]
    body = {"text": ["a", "b"], **SHORT, **TWO, "rid": ["same", "same"]}
    field, _ = refusal(server, GENERATE, body)
    assert field == "rid"
    assert wait_until(lambda: len(server.scheduler.received) >= 2, 20)
    told = [one.bootstrap for one in server.scheduler.received if isinstance(one, DeclineRoomReq)]
    assert set(told) == {room(7), room(8)}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_host": "10.0.1.1"},
        {"bootstrap_host": "elsewhere"},
        {"bootstrap_host": "localhost"},
        {"bootstrap_host": "named", "bootstrap_port": 8999},
    ],
)
def test_a_decode_server_contacts_no_server_of_its_clients_choice(
    decode: FrontServer, prefill: FrontServer, path: str, fields: dict[str, Any]
) -> None:
    body = {**PROMPTS[path], **ONE, **fields}
    field, message = refusal(decode, path, body)
    assert field == "bootstrap_host"
    assert "--disaggregation-prefill-hosts" in message
    # Refused for another reason: nobody is told of it either.
    refusal(decode, path, {**body, "temperature": -1, "sampling_params": {"top_p": 7}})
    post(decode, GENERATE, {"text": "a", **SHORT, **ONE})
    (first,) = decode.scheduler.received
    assert isinstance(first, TokenizedGenerateReqInput), "no room was declined before"
    assert rooms(prefill, path, body)[0] is not None, "it is the prefill server itself"


def test_of_a_batch_with_a_foreign_server_the_other_rooms_are_declined(
    decode: FrontServer,
) -> None:
    hosts = {"bootstrap_host": ["10.0.0.1", "elsewhere"]}
    refusal(decode, GENERATE, {"text": ["a", "b"], **SHORT, **TWO, **hosts})
    assert wait_until(lambda: bool(decode.scheduler.received), 20)
    (told,) = decode.scheduler.received
    assert isinstance(told, DeclineRoomReq) and told.bootstrap == room(7)


def test_rooms_on_a_unified_server_are_nobodys(server: FrontServer) -> None:
    refusal(server, GENERATE, {"text": "a", "sampling_params": {"top_p": 7}, **ONE})
    assert not server.scheduler.received


def test_probes_of_the_server_itself_need_no_room(
    decode: FrontServer, prefill: FrontServer
) -> None:
    for server in (decode, prefill):
        assert httpx.get(f"{server.url}/health_generate", timeout=20).status_code == 200


def test_the_prompts_logprobs_are_the_prefill_servers(
    decode: FrontServer, prefill: FrontServer
) -> None:
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, **SHORT, **ONE}
    told = post(prefill, GENERATE, body).json()["meta_info"]
    assert [one[1] for one in told["input_token_logprobs"]] == [64, 65, 66]
    told = post(decode, GENERATE, body).json()["meta_info"]
    assert told["input_token_logprobs"] == [], "a router puts the prefill server's before it"
    assert len(told["output_token_logprobs"]) == 2
    (sent,) = decode.requests
    assert sent.logprob_start_len == -1


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"top_logprobs_num": 1},
        {"text": ["a", "b"], **TWO},
        {"sampling_params": {"n": 2}},
    ],
)
def test_prompt_logprobs_that_would_be_lost_are_refused(
    decode: FrontServer, prefill: FrontServer, more: dict[str, Any]
) -> None:
    body = {"text": "a", "return_logprob": True, "logprob_start_len": 0, **ONE, **more}
    for server in (decode, prefill):
        field, message = refusal(server, GENERATE, body)
        assert field == "logprob_start_len"
        assert "leave logprob_start_len out" in message
    del body["logprob_start_len"]
    assert post(decode, GENERATE, body).status_code == 200


def test_echoed_logprobs_are_refused(decode: FrontServer) -> None:
    body = {"prompt": "a", "echo": True, **ONE}
    field, message = refusal(decode, COMPLETIONS, {**body, "logprobs": 0})
    assert (field, message[:18]) == ("echo", "echo with logprobs")
    assert rooms(decode, COMPLETIONS, body) == [room(7)]

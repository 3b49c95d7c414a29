"""Rows F2 and F4 on a real server: no endpoint works without the right key, however it is called;
clients that disconnect in mid-stream leave no resources in use.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Final

import httpx
import psutil
import pytest

from rigs.servers.engine_server import ADMIN_KEY
from rigs.servers.keyed_server import HEADERS, USER_KEY, KeyedServer
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=18, suite="base-b-test-cpu")


pytestmark = pytest.mark.usefixtures("server_serves_on")


USER_PATHS: Final = [
    ("POST", "/generate"), ("PUT", "/generate"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/v1/tokenize"), ("POST", "/v1/detokenize"),
    ("GET", "/v1/models"), ("GET", "/model_info"), ("GET", "/server_info"), ("GET", "/get_load"),
]  # fmt: skip
ADMIN_PATHS: Final = [
    ("POST", "/flush_cache"), ("POST", "/abort_request"), ("GET", "/hicache/storage-backend"),
    ("PUT", "/hicache/storage-backend"), ("DELETE", "/hicache/storage-backend"),
    ("POST", "/hicache/storage-backend/clear"),
]  # fmt: skip
WRONG: Final = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {USER_KEY}"},
    {"Authorization": USER_KEY},
    {"Authorization": f"Bearer {USER_KEY}x"},
    {"Authorization": f"Bearer {USER_KEY[:-1]}"},
    {"Authorization": f"bearer {USER_KEY.upper()}"},
    {"X-Api-Key": f"{USER_KEY}x"},
    {"Authorization": "Bearer wrong", "X-Api-Key": USER_KEY},
]


def test_f2_without_the_right_key_every_endpoint_answers_401(server: KeyedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for (method, path), headers in itertools.product(USER_PATHS + ADMIN_PATHS, WRONG):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path, headers, response.text)
            assert response.json()["error"]["type"] == "authentication_error"
            assert USER_KEY not in response.text
        for method, path in ADMIN_PATHS:
            assert client.request(method, path, headers=HEADERS).status_code == 403, (method, path)


DISGUISES: Final = (
    "/flush_cache/", "//flush_cache", "/%66lush_cache", "/flush_cache?x=/health", "/nowhere",
    "/health/../flush_cache", "/hicache/storage-backend/", "/hicache/storage-backend/clear/",
)  # fmt: skip


def test_f2_other_spellings_of_a_path_need_the_key_too(server: KeyedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for path in DISGUISES:
            assert client.post(path).status_code == 401, path
            # No spelling lets a user's key reach the administration.
            assert client.post(path, headers=HEADERS).status_code in (307, 403, 404, 405), path


def test_f2_right_keys_work_and_other_methods_change_nothing(server: KeyedServer) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/server_info"), ("GET", "/get_load")):
        assert server.call(method, path, HEADERS).status_code == 200
    for path in ("/health", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/flush_cache", "/abort_request", "/hicache/storage-backend/clear"):
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            assert server.call(method, path).status_code == 405, (method, path)
    assert server.call("GET", "/hicache/storage-backend").status_code == 200
    assert server.call("POST", "/flush_cache?timeout=30").status_code == 200
    shown = server.call("GET", "/server_info").text + server.log()
    assert USER_KEY not in shown
    assert ADMIN_KEY not in shown


def test_f2_a_preflight_needs_no_key_and_the_request_does(server: KeyedServer) -> None:
    page = {"Origin": "https://page.example"}
    leave = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x,y"}
    preflight = httpx.options(f"{server.url}/generate", headers=page | leave)
    assert preflight.status_code == 200
    for headers, status in ((page, 401), (page | HEADERS, 400)):
        answer = httpx.post(f"{server.url}/generate", headers=headers, json={})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
    # An OPTIONS request that is not a preflight reaches no endpoint.
    for method, path in USER_PATHS + ADMIN_PATHS:
        assert httpx.options(server.url + path, headers=page).status_code == 405, (method, path)


CLIENTS: Final = 400


async def vanish(port: int, rid: str, abort: bool) -> bool:
    """Start a stream, read its first event, and disconnect. Returns whether it had begun."""
    body = json.dumps(
        {
            "input_ids": [300 + sum(rid.encode()) % 1000] * 40,
            "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
            "stream": True,
            "rid": rid,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_head("/generate", USER_KEY, len(body)) + body)
        first = await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        if abort:
            await _abort(port, rid)
    finally:
        writer.close()
    return first.startswith(b"HTTP/1.1 200")


async def _abort(port: int, rid: str) -> None:
    body = json.dumps({"rid": rid}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("/abort_request", ADMIN_KEY, len(body)) + body)
    status = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
    assert status.startswith(b"HTTP/1.1 200"), status
    writer.close()


def _head(path: str, key: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_f4_hundreds_of_disconnects_in_mid_stream_release_everything(
    server: KeyedServer,
) -> None:
    rids = [f"vanishes-{number}" for number in range(CLIENTS)]

    async def storm() -> list[bool]:
        return await asyncio.gather(
            *(vanish(server.port, rid, number % 2 == 0) for number, rid in enumerate(rids))
        )

    assert all(asyncio.run(storm()))

    def load() -> dict[str, int]:
        answer: dict[str, int] = server.call("GET", "/get_load", HEADERS).json()[0]
        return answer

    assert wait_until(lambda: load()["num_reqs"] == 0, 60), load()
    assert server.call("POST", "/flush_cache?timeout=30").status_code == 200
    state = server.call("GET", "/server_info", HEADERS).json()["internal_states"][0]
    assert (state["used_tokens"], state["evictable_tokens"]) == (0, 0)
    assert state["free_tokens"] == state["max_total_num_tokens"]
    assert state["busy"] == {}
    # An id that a request still held would be refused as in use.
    again = {"input_ids": [[300, 301]] * CLIENTS, "rid": rids}
    params = {"max_new_tokens": 1, "temperature": 0}
    answers = httpx.post(
        f"{server.url}/generate",
        json={**again, "sampling_params": params},
        headers=HEADERS,
        timeout=60,
    )
    assert answers.status_code == 200, answers.text[:300]
    assert [answer["meta_info"]["id"] for answer in answers.json()] == rids
    process = psutil.Process(server.process.pid)

    def half_closed() -> int:
        connections = process.net_connections("tcp")
        return sum(c.status == psutil.CONN_CLOSE_WAIT for c in connections)

    assert wait_until(lambda: half_closed() == 0, 30), half_closed()

"""Row F4 on a real server: clients that disconnect in mid-stream leave no resources in use."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import httpx
import psutil
import pytest

from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_server import ADMIN_KEY
from sglang.test.keyed_server import HEADERS, USER_KEY, KeyedServer

register_cpu_ci(est_time=10, suite="base-b-test-cpu")


pytestmark = pytest.mark.usefixtures("server_serves_on")


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

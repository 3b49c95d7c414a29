"""Servers that share a secret, and a decode server that has another: real processes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import httpx
import psutil
import pytest

from rigs.disaggregation.pd_servers import TCP, decode_server, prefill_server
from rigs.servers.engine_server import EngineServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

SECRET: Final = secrets.token_hex(32)
FILE: Final = "--disaggregation-secret-file"
REMEDY: Final = f"give both servers the same {FILE} or SGLANG_DISAGGREGATION_SECRET"


@dataclass(slots=True)
class Servers:
    """A prefill server, a decode server with its secret, and one with another."""

    prefill: EngineServer
    port: int
    decode: EngineServer
    stranger: EngineServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    path = tmp_path_factory.mktemp("secrets") / "deployment"
    path.write_text(SECRET)
    path.chmod(0o600)
    with ExitStack() as stack:
        prefill, port = prefill_server(FILE, str(path))
        decode = decode_server(env={**TCP, "SGLANG_DISAGGREGATION_SECRET": SECRET})
        other = {**TCP, "SGLANG_DISAGGREGATION_SECRET": secrets.token_hex(32)}
        stranger = decode_server(env=other)
        for server in (prefill, decode, stranger):
            stack.enter_context(server)
        yield Servers(prefill, port, decode, stranger)


def generate(servers: Servers, decode: EngineServer, room: int) -> list[httpx.Response]:
    """The answers of the prefill server and of `decode`, as the router would ask for them."""
    body: dict[str, Any] = {
        "text": "The code of heron is 7391. The code of heron is",
        "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.port,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(2) as pool:
        urls = [f"{server.url}/generate" for server in (servers.prefill, decode)]
        return list(pool.map(lambda url: httpx.post(url, json=body, timeout=120), urls))


def log_of(server: EngineServer) -> str:
    return server.process.log_path.read_text()


def test_equal_secrets_serve(servers: Servers) -> None:
    answers = generate(servers, servers.decode, 1)
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text


def test_the_transfer_engine_is_described_as_it_is(servers: Servers) -> None:
    """The decode server has met the prefill server since its start."""
    generate(servers, servers.decode, 2)
    info = servers.decode.request("GET", "/server_info").body["transfer_engine"]
    assert len(info["requests_in_flight"]) == 1


def test_another_secret_is_refused_and_both_sides_name_the_remedy(servers: Servers) -> None:
    body = {"text": "a", "bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    answer = httpx.post(
        f"{servers.stranger.url}/generate", json={**body, "bootstrap_room": 3}, timeout=120
    )
    assert answer.status_code == 503
    why = f"has another secret than this prefill server: {REMEDY}"
    assert f"the decode server {why}" in answer.json()["error"]["message"]
    assert f"the decode server at 127.0.0.1 {why}" in log_of(servers.prefill)


def test_the_secret_is_nowhere(servers: Servers) -> None:
    """Logs, answers and lists of processes never show the secret."""
    for server in (servers.prefill, servers.decode):
        info = server.request("GET", "/server_info").body
        assert info["disaggregation_secret"] == "***"
        assert SECRET not in str(info)
        assert SECRET not in log_of(server)
        tree = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
        assert SECRET not in str([process.cmdline() for process in tree])

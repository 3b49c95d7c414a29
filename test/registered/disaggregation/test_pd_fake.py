"""Servers whose transport moves nothing: each answers alone, without a router or another server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from rigs.servers.forked_servers import ForkedServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

TEXT = "The code of heron is 7391. The code of heron is"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ForkedServer]]:
    flags = ("--disaggregation-transfer-backend", "fake", "--page-size", "16", "--enable-metrics")
    modes = ("prefill", "decode")
    made = {mode: ForkedServer("--disaggregation-mode", mode, *flags) for mode in modes}
    with ExitStack() as stack:
        for server in made.values():
            stack.enter_context(server)
        yield made


@pytest.mark.parametrize(("mode", "length"), [("prefill", 1), ("decode", 6)])
@pytest.mark.parametrize("room", [{}, {"bootstrap_host": "2.2.2.2", "bootstrap_room": 5}])
def test_each_server_answers_alone(
    servers: dict[str, ForkedServer], mode: str, length: int, room: dict[str, object]
) -> None:
    # A decode server answers noise, which may have an end.
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"text": TEXT, "sampling_params": params, "return_logprob": True, **room}
    body["top_logprobs_num"] = 2
    answer = httpx.post(f"{servers[mode].url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    info = answer.json()["meta_info"]
    assert (info["completion_tokens"], info["finish_reason"]["type"]) == (length, "length")
    assert len(info["output_top_logprobs"]) == length


def test_many_requests_at_once_leave_nothing_behind(servers: dict[str, ForkedServer]) -> None:
    for mode, length in (("prefill", 1), ("decode", 8)):
        body = {"text": [f"{number} {TEXT}" for number in range(40)]}
        params = {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        answer = httpx.post(f"{servers[mode].url}/generate", json=body | params, timeout=60)
        assert [one["meta_info"]["completion_tokens"] for one in answer.json()] == [length] * 40
        metrics = httpx.get(f"{servers[mode].url}/metrics").text
        queues = [
            line for line in metrics.splitlines() if "_queue_reqs" in line and "#" not in line
        ]
        assert queues and all(line.endswith(" 0.0") for line in queues), queues
        assert httpx.get(f"{servers[mode].url}/health_generate", timeout=60).status_code == 200


def test_they_listen_for_clients_alone(servers: dict[str, ForkedServer]) -> None:
    for server in servers.values():
        root = psutil.Process(server.process.pid)
        ports = {
            connection.laddr.port
            for process in (root, *root.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert ports == {httpx.URL(server.url).port}

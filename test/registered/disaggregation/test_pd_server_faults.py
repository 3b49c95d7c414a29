"""Real servers whose requests fail: by injection under load, in floods of refusals, with rooms that
are taken, and while the prefill server is away or replaced."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest

from rigs.disaggregation.pd_servers import TCP, decode_server, prefill_server, router
from rigs.servers.engine_server import EngineServer
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="base-b-test-cpu")

IMPATIENT: Final = {
    **TCP,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "8",  # A busy machine may pause for seconds.
}
IDLE_S: Final = 60.0
MAX_PROMPT: Final = 1000
"""Tokens, of what the prefill server takes; the decode servers take more."""
NAMED: Final = re.compile(
    r"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: (asking|reading|confirming) failed"
)


@dataclass(slots=True)
class Servers:
    """One prefill server, a decode server, and one on which a tenth of the requests fail."""

    prefill: EngineServer
    port: int
    """Port of its bootstrap server."""
    decode: EngineServer
    failing: EngineServer

    @property
    def all(self) -> list[EngineServer]:
        return [self.prefill, self.decode, self.failing]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        limit = ("--max-total-tokens", str(MAX_PROMPT), "--enable-metrics")
        prefill, port = prefill_server(*limit, env=IMPATIENT)
        started = Servers(
            prefill,
            port,
            decode_server("--enable-metrics", env=IMPATIENT),
            decode_server(
                "--enable-metrics", env={**IMPATIENT, "SGLANG_TEST_DISAGG_FAILURE_PROB": "0.1"}
            ),
        )
        for server in started.all:
            stack.enter_context(server)
        yield started


@pytest.fixture(scope="module")
def url(servers: Servers) -> Iterator[str]:
    """URL of a router in front of the prefill and the good decode server."""
    with router([(servers.prefill, servers.port)], [servers.decode]) as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_is_lost(servers: Servers) -> Iterator[None]:
    yield
    for server in servers.all:
        assert wait_until(lambda server=server: not state(server)["busy"], IDLE_S), state(server)  # type: ignore[misc]
        found = state(server)
        assert found["free_tokens"] + found["evictable_tokens"] == found["max_total_num_tokens"]
        assert server.request("GET", "/health").status == 200


def state(server: EngineServer) -> Any:
    return server.request("GET", "/server_info").body["internal_states"][0]


def body(seed: int, length: int = 60, wanted: int = 8) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "input_ids": [rng.randrange(300, 2000) for _ in range(length)],
        "sampling_params": {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True},
    }


def post(url: str, of: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=of, timeout=120)


def text_of(reply: httpx.Response) -> str:
    return reply.text.replace("\\", "")


def num_failed(server: EngineServer) -> float:
    """Requests that the server has counted as failed between the servers."""
    found = server.metrics()
    kinds = ("bootstrap", "transfer")
    return sum(found[f"sglang:num_{kind}_failed_reqs_total"] for kind in kinds)


# ---- failures under load -----------------------------------------------------------------------


def test_a_tenth_of_the_requests_fails_under_load(servers: Servers, url: str) -> None:
    """Each ends, with the right words or with an error that names the step."""
    bodies = [body(number % 40, 20 + 9 * (number % 40)) for number in range(100)]
    expected = {len(of["input_ids"]): post(url, of).json()["output_ids"] for of in bodies[:40]}
    before = num_failed(servers.prefill), num_failed(servers.failing)
    with (
        router([(servers.prefill, servers.port)], [servers.failing]) as failing,
        ThreadPoolExecutor(16) as pool,
    ):
        replies = list(pool.map(lambda of: post(failing, of), bodies))
    steps: Counter[str] = Counter()
    for of, reply in zip(bodies, replies, strict=True):
        if reply.status_code == 200:
            assert reply.json()["output_ids"] == expected[len(of["input_ids"])]
        else:
            found = NAMED.search(text_of(reply))
            assert reply.status_code == 503 and found, reply.text
            steps[found[1]] += 1
    assert 0 < sum(steps.values()) < len(bodies) / 2, steps
    told = sum(steps.values())
    # A router may end a request when one server says that it failed; then the other does not count.
    failed = num_failed(servers.failing) - before[1]
    assert failed <= told <= failed + num_failed(servers.prefill) - before[0]


# ---- rooms -------------------------------------------------------------------------------------


def test_a_room_that_is_taken_is_refused_and_its_owner_unharmed(servers: Servers, url: str) -> None:
    of = {
        **body(1, wanted=1200),
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.port,
        "bootstrap_room": 77,
    }
    with ThreadPoolExecutor(2) as pool:
        both = servers.prefill, servers.decode
        answers = [pool.submit(post, server.url, of) for server in both]
        assert answers[0].result().status_code == 200, "the decode server has read the prompt"
        for server in (servers.decode, servers.prefill):
            reply = post(server.url, {**of, **body(2)})
            assert reply.status_code == 400, reply.text
            assert "bootstrap_room 77 belongs to another request" in text_of(reply)
        owner = answers[1].result()
    assert owner.status_code == 200
    assert len(owner.json()["output_ids"]) == 1200


# ---- floods ------------------------------------------------------------------------------------


def test_a_flood_of_refused_requests_does_not_hold_up_others(servers: Servers, url: str) -> None:
    """The decode server accepts what the prefill server refuses. Slots and threads for it are free
    again when the refusal is heard."""

    def latencies() -> list[float]:
        found = []
        for number in range(5):
            began = time.monotonic()
            assert post(url, body(1000 + number)).status_code == 200
            found.append(time.monotonic() - began)
        return sorted(found)

    stop = threading.Event()
    refused: Counter[int] = Counter()

    def flood(seed: int) -> None:
        for number in range(1, 100_000):
            if stop.is_set():
                return
            of = {
                **body(seed, MAX_PROMPT + 100),
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": servers.port,
                "bootstrap_room": seed * 1_000_000 + number,
            }
            prefill = pool.submit(post, servers.prefill.url, of)
            reply = post(servers.decode.url, of)
            assert "prefill server ended the request: input_ids has 1100" in text_of(reply)
            refused[reply.status_code] += 1
            assert prefill.result().status_code == 400

    alone = latencies()
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(4) as flooding:
        floods = [flooding.submit(flood, seed) for seed in range(1, 5)]
        try:
            during = latencies()
        finally:
            stop.set()
        for one in floods:
            one.result()
    print(
        f"p99 alone {alone[-1]:.3f} s, during {sum(refused.values())} refusals {during[-1]:.3f} s"
    )
    assert refused.keys() == {503} and refused[503] > 10
    # Four more clients share the cores. A refusal that is not sent takes 300 s to be noticed.
    assert during[-1] < 60


# ---- a prefill server that is away -------------------------------------------------------------


def test_another_prefill_server_takes_the_killed_ones_place(servers: Servers, url: str) -> None:
    """Requests under way fail with a reason, also those of the time without any. The decode server
    notices that another one answers at the old address."""
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    # The decode server never asks for it.
    waiting = {**body(3), **bootstrap, "bootstrap_room": 501}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, servers.decode.url, waiting)
        waits = "sglang:num_decode_prealloc_queue_reqs"
        assert wait_until(lambda: servers.decode.metrics()[waits] == 1, IDLE_S)
        servers.prefill.process.send_signal(signal.SIGKILL)
        kill_process_tree(servers.prefill.process.pid)
        servers.prefill.process.wait(60)
        lost = reply.result()
    assert lost.status_code == 503
    # The control connection or the bootstrap server is silent.
    assert re.search("has not answered for 8 s|it cannot be reached", text_of(lost)), lost.text
    nobody = post(servers.decode.url, {**body(3), **bootstrap, "bootstrap_room": 502})
    assert nobody.status_code == 503
    assert "the prefill server is not found" in text_of(nobody)
    assert "it cannot be reached" in text_of(nobody)
    assert post(url, body(3)).status_code >= 500
    assert servers.decode.request("GET", "/health").status == 200
    servers.prefill.start()
    assert wait_until(lambda: post(url, body(3)).status_code == 200, IDLE_S)
    # And where the other one comes while a request waits: the room is not known to it.
    route = httpx.get(f"http://127.0.0.1:{servers.port}/route?rank=0", timeout=20).json()
    assert (
        route["instance_id"]
        == servers.prefill.request("GET", "/server_info").body["routes"][0]["instance_id"]
    )

"""Rows C17 and C8 on a real server: administration while busy and idle, a killed node."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rigs.servers.engine_server import EXACT, EngineServer, HttpReply
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.distributed.device_communicators.mooncake_protocol import list_rdma_devices
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-b-test-cpu")

BACKEND = "/hicache/storage-backend"
MOONCAKE = {
    "hicache_storage_backend": "mooncake",
    "hicache_storage_prefetch_policy": "wait_complete",
}


def tokens(seed: int, count: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(count)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    flags = {"client_ttl": 2}
    with MooncakeCluster(num_nodes=3, segment_size="64mb", master_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def server(cluster: MooncakeCluster) -> Iterator[EngineServer]:
    """A server with two tiers; tests attach the store over HTTP."""
    flags = (
        "--enable-hierarchical-cache",
        "--max-total-tokens",
        "4096",
        "--hicache-ratio",
        "1.0",
        "--hicache-allow-dynamic-attach",
        "--enable-metrics",
        *EXACT,
    )
    env = cluster.engine_env() | {"SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK": "1"}
    with ForkedServer(*flags, env=env) as running:
        yield running


def administer(server: EngineServer, method: str, path: str = "", **body: str) -> HttpReply:
    return server.request(method, BACKEND + path, body or None, admin=True)


def text_of(reply: HttpReply) -> str:
    return json.dumps(reply.body)


@contextmanager
def busy(server: EngineServer) -> Iterator[None]:
    """Keep a request running inside the block."""

    def ask() -> None:
        server.request(
            "POST",
            "/generate",
            {
                "input_ids": tokens(1, 64),
                "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True},
                "rid": "long",
            },
        )

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for(lambda: server.metrics()["sglang:num_running_reqs"] >= 1)
        yield
        assert thread.is_alive(), "the request ended before the block"
    finally:
        server.request("POST", "/abort_request", {"rid": "long"}, admin=True)
        thread.join()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.05)


def test_c17_everything_is_refused_with_counts_while_busy(server: EngineServer) -> None:
    with busy(server):
        before = administer(server, "GET").body
        for reply in (
            administer(server, "PUT", **MOONCAKE),
            administer(server, "DELETE"),
            administer(server, "POST", "/clear"),
            server.request("POST", "/flush_cache", admin=True),
            server.request("POST", "/flush_cache?timeout=0.2", admin=True),
        ):
            assert reply.status == 400, reply
            assert "running" in text_of(reply) and "1" in text_of(reply), reply
        assert administer(server, "GET").body == before
    server.flush()


def test_the_transport_of_the_store_is_in_the_server_info(server: EngineServer) -> None:
    def transport() -> object:
        state = server.request("GET", "/server_info").body["internal_states"][0]
        return state["hicache"]["hicache_storage_transport"]

    assert transport() is None
    has_rdma = any(not device.is_efa for device in list_rdma_devices())
    for requested in ("tcp", *(() if has_rdma else ("rdma",))):
        extra = json.dumps({"protocol": requested})
        told = administer(
            server, "PUT", **MOONCAKE, hicache_storage_backend_extra_config_json=extra
        )
        assert told.status == 200
        assert transport() == {
            "protocol": "tcp",
            "requested_protocol": requested,
            "is_fallback": requested != "tcp",
            "ib_device": "",
        }
        assert administer(server, "DELETE").status == 200
    assert transport() is None


def test_c17_backends_come_and_go_over_http(cluster: MooncakeCluster, server: EngineServer) -> None:
    prompt = tokens(17)
    cold = server.generate(prompt).output_ids
    assert administer(server, "GET").body["hicache_storage_backend"] is None
    # Invalid settings are refused and leave nothing attached.
    wrong = {**MOONCAKE, "hicache_storage_backend": "nosuch"}
    assert administer(server, "PUT", **wrong).status == 400
    waiting = json.dumps({"on_unreachable": "wait"})
    reply = administer(server, "PUT", **MOONCAKE, hicache_storage_backend_extra_config_json=waiting)
    assert reply.status == 400 and "on_unreachable" in text_of(reply)
    gone = json.dumps({"master_server_address": "127.0.0.1:1"})
    began = time.monotonic()
    reply = administer(server, "PUT", **MOONCAKE, hicache_storage_backend_extra_config_json=gone)
    assert reply.status == 400 and "MOONCAKE_MASTER" in text_of(reply)
    assert time.monotonic() - began < 30, "less than Mooncake itself would try"
    assert administer(server, "GET").body["hicache_storage_backend"] is None

    # Attaching twice is idempotent; policies can change; another backend needs a detach first.
    for _ in range(2):
        assert administer(server, "PUT", **MOONCAKE).status == 200
    update = {**MOONCAKE, "hicache_storage_prefetch_policy": "timeout"}
    assert administer(server, "PUT", **update).status == 200
    reply = administer(server, "PUT", hicache_storage_backend="file")
    assert reply.status == 400 and "detach" in text_of(reply)
    state = administer(server, "GET").body
    assert state["hicache_storage_backend"] == "mooncake"
    assert state["hicache_storage_prefetch_policy"] == "timeout"

    # Pages that were computed before the attach are stored at their next use.
    server.generate(prompt)
    server.flush()
    assert len(cluster.master.keys()) >= 9
    assert_from_storage(server, prompt, cold)

    # Detaching twice is idempotent; policies and objects stay.
    stored = set(cluster.master.keys())
    for _ in range(2):
        assert administer(server, "DELETE").status == 200
    state = administer(server, "GET").body
    assert state["hicache_storage_backend"] is None
    assert state["hicache_storage_prefetch_policy"] == "timeout"
    server.flush()
    assert server.generate(prompt).meta_info["cached_tokens"] == 0
    assert stored <= set(cluster.master.keys())
    assert administer(server, "POST", "/clear").status == 400
    assert stored <= set(cluster.master.keys())

    # After another attach it reads its objects; clearing removes them and is idempotent.
    server.flush()
    assert administer(server, "PUT", **MOONCAKE).status == 200
    assert_from_storage(server, prompt, cold)
    server.flush()
    for _ in range(2):
        assert administer(server, "POST", "/clear").status == 200
    assert not stored & set(cluster.master.keys())
    assert server.generate(prompt).meta_info["cached_tokens"] == 0
    # The log has all actions of the operator.
    log = server.process.log_path.read_text(errors="replace")
    for word in ("attached", "updated the policies", "detached", "cleared"):
        assert f"administration of L3: {word}" in log, word


def test_no_configuration_ends_or_stalls_the_server(server: EngineServer, tmp_path: Path) -> None:
    """Every invalid configuration is refused, and requests continue."""
    server.flush()
    assert administer(server, "DELETE").status == 200
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    dynamic = {"backend_name": "b", "module_path": "no_such_module", "class_name": "B"}
    for backend, config in (
        ("file", "[" * 60_000),
        ("file", "[" * 200_000),
        ("file", json.dumps({"prefetch_threshold": 10**30})),
        ("file", json.dumps({"prefetch_threshold": "\ud800"})),
        ("file", f"@{fifo}"),
        ("file", "@/dev/zero"),
        ("dynamic", json.dumps(dynamic)),
    ):
        server.flush()
        reply = administer(
            server, "PUT",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config_json=config,
        )  # fmt: skip
        assert reply.status == 400 and "busy" not in text_of(reply), (config[:80], reply)
        assert administer(server, "GET").body["hicache_storage_backend"] is None
        assert len(server.generate(tokens(99, 64), 2, {"ignore_eos": True}).output_ids) == 2
    server.flush()
    assert administer(server, "PUT", **MOONCAKE).status == 200


def assert_from_storage(server: EngineServer, prompt: list[int], cold: list[int]) -> None:
    answer = server.generate(prompt)
    assert answer.cached["storage"] == 576, answer.cached
    assert answer.output_ids == cold


def test_c17_the_first_of_several_administrators_wins(server: EngineServer) -> None:
    """The first of several calls wins; none hangs, and no page is lost."""
    administer(server, "PUT", **MOONCAKE)
    replies: list[HttpReply] = []

    def attack(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(6):
            match rng.randrange(5):
                case 0:
                    replies.append(administer(server, "PUT", **MOONCAKE))
                case 1:
                    replies.append(administer(server, "DELETE"))
                case 2:
                    replies.append(administer(server, "POST", "/clear"))
                case 3:
                    replies.append(server.request("POST", "/flush_cache", admin=True))
                case 4:
                    server.generate(tokens(rng.randrange(3), 200), max_new_tokens=2)

    threads = [threading.Thread(target=attack, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {reply.status for reply in replies} <= {200, 400}
    server.flush()
    assert server.request("GET", "/health").status == 200


def test_c8_a_node_killed_under_load_of_a_server(
    cluster: MooncakeCluster, server: EngineServer
) -> None:
    """All answers have the same words, and pages of the dead node are counted misses."""
    administer(server, "PUT", **MOONCAKE)
    # More than L1 and L2 hold together, so that the store is read continually.
    prompts = [tokens(800 + seed, 700) for seed in range(16)]
    cold = [server.generate(prompt).output_ids for prompt in prompts]
    server.flush()
    before = server.metrics()
    wrong: list[int] = []
    answered: list[int] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10):
            which = rng.randrange(len(prompts))
            if server.generate(prompts[which]).output_ids != cold[which]:
                wrong.append(which)
            answered.append(which)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answered) >= 4)
    cluster.nodes[2].kill()
    for thread in threads:
        thread.join()
    assert len(answered) == 40 and not wrong
    # All prompts once more, from the nodes that are left.
    server.flush()
    for prompt, words in zip(prompts, cold, strict=True):
        assert server.generate(prompt).output_ids == words
    server.flush()
    after = server.metrics()
    grown = {name for name in after if after[name] > before.get(name, 0.0)}
    assert any(
        name.startswith(("sglang:hicache_prefetch_total", "sglang:hicache_storage_pages_total"))
        and ('"miss"' in name or '"failed"' in name)
        for name in grown
    ), "the loss of a third of the objects shows in no counter"

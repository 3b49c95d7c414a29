"""`python -m sglang.launch_server --tp-size 2`: clients, operators, sockets, the end."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai
import psutil
import pytest

import sglang
from rigs.recall.recall_task import heldout_conversation
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EXACT, EngineServer, HttpReply
from rigs.servers.forked_servers import ForkedServer, forking_engines
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-b-test-cpu")

PAGE: Final = 16
IDS: Final = prompt(1, 200)
WHOLE: Final = 192
"""Tokens of the whole pages of IDS."""
STORE: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
FILE: Final = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config_json": json.dumps({"prefetch_threshold": PAGE}),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[EngineServer]:
    """The built-in model on two ranks, with two tiers; tests attach the third over HTTP."""
    with EngineServer(
        "--tp-size", "2", "--device", "cpu", "--enable-metrics", "--page-size", str(PAGE),
        "--enable-hierarchical-cache", "--max-total-tokens", "16384", *EXACT,
        env={STORE: str(store)},
    ) as running:  # fmt: skip
        yield running


def family_of(server: EngineServer) -> list[psutil.Process]:
    """The server's process and those that it has started."""
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def title_of(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()


def test_the_openai_client_gets_the_recalled_facts(server: EngineServer) -> None:
    conversations = [heldout_conversation(seed, 600) for seed in range(8)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(number: int) -> bool:
            conversation = conversations[number]
            turn = conversation.first_tail_turn
            messages: Any = conversation.messages_before(turn)
            reply = client.chat.completions.create(
                model="sglang-builtin", messages=messages, temperature=0, max_tokens=16
            )
            said = reply.choices[0].message.content
            return said is not None and said.strip() == conversation.turns[turn].answer

        with ThreadPoolExecutor(len(conversations)) as pool:
            assert list(pool.map(ask, range(len(conversations)))) == [True] * len(conversations)


def test_operators_see_each_rank(server: EngineServer) -> None:
    titles = sorted(map(title_of, family_of(server)))
    assert [title for title in titles if title.startswith("sglang::scheduler")] == [
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
    ]
    info = server.request("GET", "/server_info").body
    assert (info["tp_size"], info["nnodes"]) == (2, 1)
    assert server.request("GET", "/health_generate").status == 200
    before = server.metrics()
    answer = server.generate(IDS[:50], max_new_tokens=7, sampling={"ignore_eos": True})
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    (name,) = [name for name in grown if name.startswith("sglang:generation_tokens_total")]
    assert grown[name] == len(answer.output_ids) == 7, "counted once, not once for each rank"


def test_every_socket_is_on_loopback(server: EngineServer) -> None:
    """Ranks, the store through which they meet and gloo listen for this machine alone."""
    found: dict[str, list[str]] = {}
    for process in family_of(server):
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                found.setdefault(title_of(process), []).append(one.laddr.ip)
    print({title: len(addresses) for title, addresses in found.items()})
    ranks = {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
    assert ranks <= set(found), "gloo listens on each rank, and the store on rank 0"
    assert {ip for addresses in found.values() for ip in addresses} <= {
        "127.0.0.1",
        "::ffff:127.0.0.1",
    }


def administer(server: EngineServer, method: str, path: str = "", **body: str) -> HttpReply:
    return server.request(method, "/hicache/storage-backend" + path, body or None, admin=True)


def cached(server: EngineServer) -> tuple[list[int], tuple[int, int, int]]:
    answer = server.generate(IDS, sampling={"ignore_eos": True})
    found = answer.cached
    return answer.output_ids, (found["device"], found["host"], found.get("storage", 0))


def objects_in(store: Path) -> list[Path]:
    return list(store.glob("*/??/*"))


@contextmanager
def busy(server: EngineServer) -> Iterator[None]:
    """A request runs inside the block."""
    body = {
        "input_ids": prompt(3, 40),
        "rid": "long",
        "sampling_params": {"max_new_tokens": 12000, "ignore_eos": True},
    }
    thread = threading.Thread(target=server.request, args=("POST", "/generate", body))
    thread.start()
    try:
        assert wait_until(lambda: server.metrics()["sglang:num_running_reqs"] >= 1, 30)
        yield
    finally:
        server.request("POST", "/abort_request", {"rid": "long"}, admin=True)
        thread.join(60)


def test_l3_is_attached_used_cleared_and_detached(server: EngineServer, store: Path) -> None:
    server.flush()
    cold, found = cached(server)
    assert found == (0, 0, 0)
    with busy(server):
        for reply in (administer(server, "PUT", **FILE), administer(server, "DELETE")):
            assert reply.status == 400 and "running" in json.dumps(reply.body)
        assert server.request("POST", "/flush_cache", admin=True).status == 400
    server.flush()
    assert administer(server, "PUT", **FILE).status == 200
    assert cached(server) == (cold, (0, 0, 0))
    server.flush()
    assert cached(server) == (cold, (0, 0, WHOLE))
    shares = Counter(path.name.partition("%2F")[0] for path in objects_in(store))
    assert len(shares) >= WHOLE // PAGE
    assert set(shares.values()) == {2}, "of each page each rank writes its heads"
    server.flush()
    assert administer(server, "POST", "/clear").status == 200
    assert not objects_in(store)
    assert cached(server) == (cold, (0, 0, 0))
    server.flush()
    assert administer(server, "DELETE").status == 200
    assert administer(server, "GET").body["hicache_storage_backend"] is None
    assert cached(server) == (cold, (0, 0, 0))


def test_sigterm_ends_all_ranks(server: EngineServer) -> None:
    """The last one: it ends the server of this file."""
    family = family_of(server)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.generate, IDS, 400, {"ignore_eos": True})
        assert wait_until(lambda: server.metrics()["sglang:num_running_reqs"] >= 1, 30)
        assert server.stop() == 0
        assert len(asked.result(60).output_ids) == 400, "what runs may finish"
    assert wait_until(lambda: not any(map(is_alive, family)), 60)
    log = server.process.log_path.read_text()
    for rank in (0, 1):
        assert re.search(rf"scheduler {rank}\] I shut down\n", log), log[-2000:]


def test_what_is_on_its_way_to_l3_is_written_before_the_end(tmp_path: Path) -> None:
    flags = (
        "--tp-size", "2", "--device", "cpu", "--page-size", str(PAGE), "--max-total-tokens", "2048",
        "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE}), *EXACT,
    )  # fmt: skip
    with ForkedServer(*flags, env={STORE: str(tmp_path)}) as server:
        cold, _ = cached(server)
        assert server.stop() == 0
        server.start()
        assert cached(server) == (cold, (0, 0, WHOLE))


def test_an_engine_of_two_groups_is_one_engine() -> None:
    with forking_engines():
        made = sglang.Engine(tp_size=2, attn_dp_size=2, device="cpu", max_total_tokens=2048)
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with made as engine:
        alone = [
            engine.generate(input_ids=IDS, sampling_params=params, routed_dp_rank=dp_rank)
            for dp_rank in (0, 1)
        ]
        assert alone[0]["output_ids"] == alone[1]["output_ids"]
        assert [one["meta_info"]["cached_tokens"] for one in alone] == [0, 0]
        batch = engine.generate(input_ids=[IDS] * 3, sampling_params=params)
        assert [one["output_ids"] for one in batch] == [alone[0]["output_ids"]] * 3
        *_, last = engine.generate(input_ids=IDS, sampling_params=params, stream=True)
        assert last["output_ids"] == alone[0]["output_ids"]
        info = engine.get_server_info()
        assert len(info["internal_states"]) == info["attn_dp_size"] == 2
        assert info["sums"]["max_total_num_tokens"] == 4096
        assert engine.flush_cache(timeout=10)
        with pytest.raises(ValueError, match="routed_dp_rank=2 must be from 0 to 1"):
            engine.generate(input_ids=IDS, sampling_params=params, routed_dp_rank=2)


def test_an_engine_of_two_ranks_generates() -> None:
    with forking_engines():
        made = sglang.Engine(tp_size=2, device="cpu", max_total_tokens=2048)
    with made as engine:
        answer = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 4})
        assert len(answer["output_ids"]) <= 4
        assert engine.get_server_info()["tp_size"] == 2
        assert engine.flush_cache(timeout=10)

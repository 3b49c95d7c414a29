"""Several prefill and decode servers behind routers, with one Mooncake Store behind them.

The servers are started once. Each topology is a router in front of some of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from rigs.disaggregation.pd_servers import TCP, decode_server, prefill_server, router
from rigs.nightly_cases import nightly
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_MODEL_NAME
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-b-test-cpu")

PAGE: Final = 16
TOPOLOGIES: Final = [(1, 2), (2, 1)]
IDLE_S: Final = 60.0
STORE: Final = (
    "--hicache-storage-backend",
    "mooncake",
    "--hicache-storage-backend-extra-config",
    json.dumps({"prefetch_threshold": PAGE}),
)


@dataclass(frozen=True, slots=True)
class Servers:
    prefill: list[tuple[EngineServer, int]]
    decode: list[EngineServer]
    of_ranks: list[EngineServer]
    """Decode servers of two ranks, which are in no topology."""

    @property
    def all(self) -> list[EngineServer]:
        return [*(server for server, _ in self.prefill), *self.decode, *self.of_ranks]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Two of each kind; one store, which all of them read and write."""
    with ExitStack() as stack:
        cluster = stack.enter_context(MooncakeCluster(segment_size="128mb"))
        env = {**TCP, **cluster.engine_env()}
        flags = (*STORE, "--enable-metrics", "--hicache-size", "0.05")
        read = ("--hicache-storage-prefetch-policy", "wait_complete")
        started = Servers(
            [prefill_server(*flags, *read, env=env) for _ in range(2)],
            [decode_server(*flags, *read, env=env) for _ in range(2)],
            [decode_server(*flags, *read, "--tp-size", "2", env=env)],
        )
        for server in started.all:
            stack.enter_context(server)
        yield started


@pytest.fixture(scope="module")
def whole() -> Iterator[EngineServer]:
    """A server that prefills and decodes."""
    with ForkedServer("--page-size", str(PAGE), *EXACT) as server:
        yield server


@pytest.fixture(autouse=True)
def all_are_idle_afterwards(servers: Servers) -> Iterator[None]:
    yield
    for server in servers.all:
        assert wait_until(lambda server=server: is_idle(server), IDLE_S), state(server)  # type: ignore[misc]
        assert state(server)["used_tokens"] == 0


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=[f"{p}P{d}D" for p, d in TOPOLOGIES])
def topology(servers: Servers, request: pytest.FixtureRequest) -> Iterator[tuple[Servers, str]]:
    """Some of the servers, and the URL of the router in front of them."""
    num_prefill, num_decode = request.param
    some = Servers(servers.prefill[:num_prefill], servers.decode[:num_decode], [])
    with router(some.prefill, some.decode, "--policy", "round_robin") as url:
        yield some, url


def state(server: EngineServer) -> Any:
    return server.request("GET", "/server_info").body["internal_states"][0]


def is_idle(server: EngineServer) -> bool:
    return not state(server)["busy"]


def finished(server: EngineServer) -> int:
    return int(state(server)["counters"]["finished"])


def generate(url: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_server_answers_its_share(topology: tuple[Servers, str], whole: EngineServer) -> None:
    some, url = topology
    before = [finished(server) for server in some.all]
    questions = [
        f"{number}. The code of {name} is {7391 + number}. What is the code of {name}?"
        for number in range(6)
        for name in ("heron", "otter", "badger", "raven")
    ]

    def ask(server: EngineServer | str, text: str) -> str | None:
        url = server if isinstance(server, str) else server.url
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            answer = client.chat.completions.create(
                model=BUILTIN_MODEL_NAME,
                messages=[{"role": "user", "content": text}],
                temperature=0,
            )
        said: str | None = answer.choices[0].message.content
        return said

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: ask(url, text), questions))
    assert found == [ask(whole, text) for text in questions]
    shares = [finished(server) - was for server, was in zip(some.all, before, strict=True)]
    assert all(shares), shares
    num_prefill = len(some.prefill)
    assert sum(shares[:num_prefill]) == sum(shares[num_prefill:]) == len(questions)


@pytest.mark.parametrize(
    "topology", [TOPOLOGIES[0], nightly(TOPOLOGIES[1])], ids=["1P2D", "2P1D"], indirect=True
)
def test_the_load_test_runs_through_the_router(
    topology: tuple[Servers, str], tmp_path: Path
) -> None:
    some, url = topology
    before = [finished(server) for server in some.all]
    output = tmp_path / "figures.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang.bench_serving", "--base-url", url),
            *("--dataset-name", "random", "--num-prompts", "24", "--max-concurrency", "8"),
            *("--random-input-len", "120", "--random-output-len", "12", "--disable-tqdm"),
            *("--output-file", str(output)),
        ],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(output.read_text())
    assert figures["completed"] == 24
    shares = [finished(server) - was for server, was in zip(some.all, before, strict=True)]
    assert all(shares), shares


def test_prompts_and_answers_come_from_the_store(servers: Servers) -> None:
    """The second turn comes to the other prefill server, which has computed none of it."""
    text = "A conversation that no other test has. " * 6
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    ids = servers.decode[0].request("POST", "/v1/tokenize", {"prompt": text}).body["tokens"]
    with router(servers.prefill[:1], servers.decode[:1]) as url:
        first = generate(url, input_ids=ids, sampling_params=params)
    again = [*ids, *first["output_ids"], *ids[:9]]
    for server in servers.all:
        server.flush()
    with router(servers.prefill[1:], servers.decode[1:]) as url:
        second = generate(url, input_ids=again, sampling_params={**params, "max_new_tokens": 4})
    details = second["meta_info"]["cached_tokens_details"]
    computed = len(ids) + len(first["output_ids"]) - 1
    assert details["storage"] == computed // PAGE * PAGE
    assert details["storage_backend"] == "MooncakeStore"


@pytest.mark.parametrize("ranks", [1, 2])
def test_turns_of_a_conversation_move_what_is_new(
    servers: Servers, whole: EngineServer, ranks: int
) -> None:
    """The decode server keeps only L3's copies between two turns. Servers of other `--tp-size` have
    other objects there, so those of two ranks are their own."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    decode = servers.decode[0] if ranks == 1 else servers.of_ranks[0]
    text = f"Another conversation that no other test has, with {ranks}. " * 12
    new = decode.request("POST", "/v1/tokenize", {"prompt": text}).body["tokens"]
    ids, known, moved = list(new), 0, [0.0]
    with router(servers.prefill[:1], servers.decode[:1]) as url:
        for turn in range(4):
            before = read_mb(decode)
            answer, want = (
                generate(one, input_ids=ids, sampling_params=params)["output_ids"]
                for one in (url, whole.url)
            )
            assert answer == want
            pages = -(-len(ids) // PAGE) - known // PAGE
            moved.append((read_mb(decode) - before) / pages)
            assert turn == 0 or moved[-1] <= 1.1 * moved[1], moved
            known = len(ids) + len(answer) - 1
            ids += [*answer, *new[turn : turn + 60]]
            assert wait_until(lambda: is_idle(decode), IDLE_S), state(decode)
            decode.flush()


def read_mb(decode: EngineServer) -> float:
    """MB of pages that a decode server has read since its start."""
    return float(decode.metrics()["sglang:kv_transfer_total_mb_sum"])


def test_both_servers_measure_transfers_and_stages(servers: Servers) -> None:
    with router(servers.prefill[:1], servers.decode[:1]) as url:
        found = generate(url, text="Where has the time gone? " * 9, sampling_params={})["meta_info"]
    stages = found["stages"]
    l3_wait = stages.pop("l3_wait")
    assert l3_wait is None or 0 <= l3_wait <= stages["queue"]
    assert stages.keys() == {"queue", "prefill", "transfer", "decode"}
    assert all(seconds >= 0 for seconds in stages.values())
    assert stages["prefill"] > 0 and stages["decode"] > 0
    assert stages["prefill"] + stages["decode"] <= found["e2e_latency"]
    prefill, decode = servers.prefill[0][0].metrics(), servers.decode[0].metrics()
    for name in ("kv_transfer_latency_ms", "kv_transfer_speed_gb_s", "kv_transfer_total_mb"):
        assert decode[f"sglang:{name}_count"] > 0 and decode[f"sglang:{name}_sum"] > 0
    for name in ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total"):
        assert prefill[f"sglang:{name}"] == decode[f"sglang:{name}"] == 0
    for metrics, names in (
        (prefill, ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs")),
        (decode, ("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs")),
    ):
        assert [metrics[f"sglang:{name}"] for name in names] == [0, 0]

"""A server of several DP groups: the words of one rank, one door, a cache for each group."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import ADMIN_KEY, EngineServer, HttpReply
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.request_battery import Results, battery, differences
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.views.planted_faults import looks_once
from rigs.words_of_ranks import FAMILIES, PAGE, SOURCES, TOLERANCE, WHOLE, flags
from sglang import hicache_top
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.utils.network import check_port_available, get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-b-test-cpu")

COLD: Final = (0, 0, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dp") / "model"
    save_tiny_checkpoint(path, "qwen3", **FAMILIES["qwen3"])
    return path


def server_of(model: Path, store: Path, size: int, dp_size: int, *more: str) -> ForkedServer:
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    words = [*flags("qwen3", size), "--enable-metrics", *more]
    if dp_size > 1:
        words += ["--attn-dp-size", str(dp_size)]
    return ForkedServer(*words, env=env, model=str(model))


def ask(
    server: EngineServer, dp_rank: int | None, seed: int = 1
) -> tuple[list[int], tuple[int, int, int]]:
    """The words of a group, and how many tokens of the prompt came from which tier."""
    answer = server.generate(prompt(seed, 200), routed_dp_rank=dp_rank)
    found = answer.cached
    return answer.output_ids, (found["device"], found["host"], found.get("storage", 0))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Results]:
    """What one rank says."""
    with server_of(model, tmp_path_factory.mktemp("one"), 1, 1) as server:
        words, _ = ask(server, None)
        return words, battery(server)


@pytest.mark.parametrize(("size", "dp_size"), [(2, 2), (4, 2), (4, 4)])
def test_groups_say_what_one_rank_says(
    model: Path, tmp_path: Path, expected: tuple[list[int], Results], size: int, dp_size: int
) -> None:
    words, results = expected
    with server_of(model, tmp_path, size, dp_size) as server:
        assert ask(server, 0) == (words, COLD)
        assert ask(server, 0) == (words, SOURCES["L1"])
        server.flush()
        written = sorted(tmp_path.glob("*/??/*"))
        last = dp_size - 1
        assert ask(server, last) == (words, SOURCES["L3"]), "what another group wrote"
        assert ask(server, last) == (words, SOURCES["L1"])
        assert sorted(tmp_path.glob("*/??/*")) == written, "it is there already"
        assert differences(battery(server), results, TOLERANCE) == []
        assert server.stop() == 0


def test_groups_split_prompts_over_ranks(
    model: Path, tmp_path: Path, expected: tuple[list[int], Results]
) -> None:
    words, results = expected
    with server_of(model, tmp_path, 4, 2, "--attn-cp-size", "2") as server:
        for dp_rank in (0, 1):
            assert ask(server, dp_rank) == (words, SOURCES["L3"] if dp_rank else COLD)
            server.flush()
        assert differences(battery(server), results, TOLERANCE) == []


def test_groups_keep_states_and_draft_tokens(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, "qwen3_5", mtp=True, **FAMILIES["qwen3_5"])
    drafts = ("--speculative-algorithm", "NEXTN")
    found: list[tuple[list[int], Results]] = []
    for dp_size in (1, 2):
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / f"store {dp_size}")}
        words = [*flags("qwen3_5", dp_size), "--attn-dp-size", str(dp_size)]
        with ForkedServer(*words, *drafts[: 2 * dp_size - 2], env=env, model=str(model)) as server:
            cold, tiers = ask(server, 0)
            assert tiers == COLD
            assert ask(server, 0)[0] == cold
            server.flush()
            last = ask(server, dp_size - 1)
            assert last == (cold, SOURCES["L3"])
            found.append((cold, battery(server)))
    assert found[0][0] == found[1][0]
    assert differences(found[1][1], found[0][1], TOLERANCE) == []


EVENTS: Final = 2
"""Groups of the server below."""


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    store = tmp_path_factory.mktemp("two")
    port = free_ports(EVENTS)
    events = json.dumps({"endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv"})
    more = ("--kv-events-config", events, "--hicache-allow-dynamic-attach")
    with server_of(model, store, EVENTS, EVENTS, *more) as one:
        yield one
        assert one.stop() == 0


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        first = get_free_port()
        with contextlib.suppress(ValueError):
            for port in range(first, first + count):
                check_port_available("127.0.0.1", port, "port")
            return first


def info(server: EngineServer) -> dict[str, Any]:
    body: dict[str, Any] = server.request("GET", "/server_info").body
    return body


def waiting(server: EngineServer) -> list[int]:
    return [state["num_waiting_reqs"] for state in info(server)["internal_states"]]


@contextlib.contextmanager
def held(server: EngineServer, dp_rank: int, rid: str) -> Iterator[Future[HttpReply]]:
    """A request waits in a group inside the block, since generation is paused."""
    assert server.request("POST", "/pause_generation", admin=True).status == 200
    body = {"input_ids": prompt(7, 20), "rid": rid, "routed_dp_rank": dp_rank}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, "POST", "/generate", body)
        assert wait_until(lambda: waiting(server)[dp_rank] == 1, 60)
        yield answer
        server.request("POST", "/continue_generation", admin=True)


def test_each_group_has_a_cache_and_one_door_has_all(server: ForkedServer) -> None:
    for dp_rank in (0, 1):
        assert ask(server, dp_rank, seed=2)[1][0] == 0
        assert ask(server, dp_rank, seed=2)[1] == SOURCES["L1"]
    body = info(server)
    assert (body["dp_size"], body["attn_dp_size"], body["tp_size"]) == (2, 2, 2)
    states = body["internal_states"]
    assert len(states) == 2
    assert body["sums"]["max_total_num_tokens"] == 2048
    assert body["max_total_num_tokens"] == states[1]["max_total_num_tokens"] == 1024
    loads = server.request("GET", "/v1/loads").body
    assert loads["dp_rank_count"] == 2
    assert [one["dp_rank"] for one in loads["loads"]] == [0, 1]
    assert [one["dp_rank"] for one in server.request("GET", "/get_load").body] == [0, 1]
    assert server.request("GET", "/health_generate").status == 200


def test_a_next_turn_finds_its_prefix_without_a_session(server: ForkedServer) -> None:
    """Equal loads alone would lead to group 0."""
    server.flush()
    turn = prompt(60, 3 * PAGE)
    server.generate(turn, routed_dp_rank=1)
    for length in (40, 80):
        turn = [*turn, *prompt(61 + length, length)]
        before = len(turn) - length
        assert server.generate(turn).cached["device"] >= before // PAGE * PAGE
    assert server.generate(turn, routed_dp_rank=0).cached["device"] == 0
    server.flush()
    turn[0] += 1  # L3 has the other prompt.
    assert server.generate(turn).cached["device"] == 0
    assert server.generate(turn, routed_dp_rank=0).cached["device"] > 0, "no group has it before"


def test_metrics_have_the_label_of_the_group_and_each_name_once(server: ForkedServer) -> None:
    text = str(server.request("GET", "/metrics").body)
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    (tokens,) = (one for one in families if one.name == "sglang:max_total_num_tokens")
    assert {s.labels["dp_rank"]: s.value for s in tokens.samples} == {"0": 1024, "1": 1024}
    assert text.count("# TYPE sglang:max_total_num_tokens ") == 1


def test_an_abort_ends_the_request_of_its_group_alone(server: ForkedServer) -> None:
    with held(server, 0, "stays") as stays, held(server, 1, "goes") as goes:
        assert server.request("POST", "/abort_request", {"rid": "goes"}, admin=True).status == 200
        assert goes.result().body["meta_info"]["finish_reason"]["type"] == "abort"
        assert not stays.done()
        body = {"abort_all": True}
        assert server.request("POST", "/abort_request", body, admin=True).status == 200
        assert stays.result().body["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_flush_says_which_group_is_busy_and_empties_none(server: ForkedServer) -> None:
    ask(server, 0, seed=2)
    with held(server, 1, "busy") as answer:
        used = info(server)["internal_states"][0]["evictable_tokens"]
        reply = server.request("POST", "/flush_cache", admin=True)
        assert reply.status == 400
        assert "dp_rank 1: busy: waiting 1" in str(reply.body)
        assert "other groups" not in str(reply.body)
        assert info(server)["internal_states"][0]["evictable_tokens"] == used > 0
    assert answer.result().status == 200
    server.flush()
    assert [state["used_tokens"] for state in info(server)["internal_states"]] == [0, 0]


def test_a_pause_holds_all_groups(server: ForkedServer) -> None:
    assert server.request("POST", "/pause_generation", admin=True).status == 200
    assert [state["is_paused"] for state in info(server)["internal_states"]] == [True, True]
    assert server.request("GET", "/ready").status == 503
    assert server.request("POST", "/continue_generation", admin=True).status == 200
    assert [state["is_paused"] for state in info(server)["internal_states"]] == [False, False]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_a_group_that_is_not_there_is_refused(server: ForkedServer, path: str, field: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": ["a", "b"]},
        "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    }
    for absent in (2, -1, 10**30):
        reply = server.request("POST", path, {**bodies[path], field: absent})
        assert reply.status == 400
        assert "must be from 0 to 1" in reply.body["error"]["message"]
    wrongs: tuple[Any, ...] = (True, "1", 1.5, [0, 1], {})
    for wrong in wrongs:
        reply = server.request("POST", path, {**bodies[path], field: wrong})
        assert reply.status == 400
        assert reply.body["error"]["param"] == field


def test_what_two_groups_compute_is_written_once(model: Path, tmp_path: Path) -> None:
    extra = json.dumps({"prefetch_threshold": 4096})
    alone = ("--hicache-storage-backend-extra-config", extra)
    with server_of(model, tmp_path, 2, 2, *alone) as server:
        found = []
        for dp_rank in (0, 1):
            words, tiers = ask(server, dp_rank)
            assert tiers == COLD, "it reads nothing that is so short"
            server.flush()
            stats = {str(path): path.stat() for path in tmp_path.glob("*/??/*")}
            pages = {name: (one.st_ino, one.st_mtime_ns) for name, one in stats.items()}
            found.append((words, pages))
        assert found[0] == found[1]
        assert len(found[0][1]) >= WHOLE // PAGE


def test_what_two_groups_compute_is_put_once_into_mooncake(model: Path) -> None:
    extra = json.dumps({"prefetch_threshold": 4096})
    words = [*flags("qwen3", 2, "mooncake"), "--attn-dp-size", "2"]
    words += ["--hicache-storage-backend-extra-config", extra]
    with MooncakeCluster(segment_size="64mb") as cluster:
        master = cluster.master
        found = []
        with ForkedServer(
            *words, env=cluster.engine_env(), model=str(model), in_rank=looks_once
        ) as server:
            for dp_rank in (0, 1):
                said, tiers = ask(server, dp_rank)
                assert tiers == COLD, "it reads nothing that is so short"
                server.flush()
                names = ("key_count", "put_start_requests_total", "batch_put_start_items_total")
                found.append((said, [master.metric(f"master_{name}") for name in names]))
            assert found[0] == found[1], "the second group asked before it put"
            num_keys, *puts = found[0][1]
            assert num_keys == sum(puts) > WHOLE // PAGE, "one is the server's note"
            assert server.stop() == 0


def test_l3_is_detached_and_attached_in_all_groups(server: ForkedServer) -> None:
    server.flush()
    path = "/hicache/storage-backend"
    assert server.request("DELETE", path, admin=True).status == 200
    states = info(server)["internal_states"]
    assert [s["hicache"]["hicache_storage_backend"] for s in states] == [None, None]
    attach = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": json.dumps({"prefetch_threshold": PAGE}),
    }
    with held(server, 1, "busy") as answer:
        reply = server.request("PUT", path, attach, admin=True)
        assert reply.status == 400
        assert "dp_rank 1: busy" in str(reply.body)
        assert "other groups" not in str(reply.body)
        assert backends(server) == [None] * EVENTS
    assert answer.result().status == 200
    server.flush()
    reply = server.request("PUT", path, attach, admin=True)
    assert reply.body["message"] == "attached file"
    assert backends(server) == ["file"] * EVENTS
    with held(server, 1, "busy") as answer:
        assert server.request("DELETE", path, admin=True).status == 400
        assert backends(server) == ["file"] * EVENTS
    assert answer.result().status == 200


def test_l3_that_one_group_cannot_reach_is_attached_in_none(
    server: ForkedServer, tmp_path: Path
) -> None:
    server.flush()
    path = "/hicache/storage-backend"
    before = backends(server)
    assert server.request("DELETE", path, admin=True).status == 200
    extra = {
        "backend_name": "one", "module_path": "rigs.stores.one_group", "class_name": "ForOneGroup",
        "folder": str(tmp_path / "store"),
    }  # fmt: skip
    attach = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
        "hicache_write_policy": "write_back",
    }
    reply = server.request("PUT", path, attach, admin=True)
    assert reply.status == 400
    assert "FileExistsError" in str(reply.body)
    assert backends(server) == [None] * EVENTS
    found = server.request("GET", path, admin=True).body
    assert [one["hicache_write_policy"] for one in found["dp_groups"]] == ["write_through"] * EVENTS
    assert ask(server, 1, seed=3)[0], "requests run"
    server.flush()
    again = {"hicache_storage_backend": before[0]}
    assert server.request("PUT", path, again, admin=True).status == 200
    assert backends(server) == before


def backends(server: ForkedServer) -> list[str | None]:
    """L3 of each group."""
    found = server.request("GET", "/hicache/storage-backend", admin=True).body
    return [one["hicache_storage_backend"] for one in found["dp_groups"]]


def test_kv_events_of_each_group_have_a_port(server: ForkedServer) -> None:
    described = info(server)["kv_events"]
    assert described["dp_size"] == EVENTS
    for dp_rank in range(EVENTS):
        context = zmq.Context()
        with context.socket(zmq.SUB) as socket:
            socket.subscribe(b"kv")
            socket.rcvtimeo = 500
            socket.connect(f"tcp://127.0.0.1:{described['endpoint_port_base'] + dp_rank}")
            payload = None
            for seed in range(20, 80):
                server.generate(prompt(seed, 40), max_new_tokens=1, routed_dp_rank=dp_rank)
                with contextlib.suppress(zmq.Again):
                    _, _, payload = socket.recv_multipart()
                    break
        context.term()
        assert payload is not None, "the subscription has not come"
        assert msgspec.msgpack.decode(payload, type=KVEventBatch).attn_dp_rank == dp_rank


def test_the_views_show_one_group_and_how_many_there_are(server: ForkedServer) -> None:
    server.flush()
    server.generate(prompt(90, 40), max_new_tokens=1, routed_dp_rank=1)
    views = [hicache_top.ask(server.url, ADMIN_KEY, dp_rank) for dp_rank in (0, 1)]
    assert [(view["dp_rank"], view["dp_size"]) for view in views] == [(0, 2), (1, 2)]
    assert [len(view["prefixes"]) for view in views] == [0, 1]
    console = Console(width=300, file=io.StringIO())
    console.print(hicache_top.draw(views[1], 300))
    assert "DP group 1 of 0 to 1" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(hicache_top.NoAnswer, match="this server has the groups 0 to 1"):
        hicache_top.ask(server.url, ADMIN_KEY, 2)


def test_profiles_of_groups_have_files_of_their_own(server: ForkedServer) -> None:
    reply = server.request("POST", "/start_profile", {"num_steps": 2}, admin=True)
    assert reply.status == 200
    files = [one["file"] for one in reply.body["dp_groups"]]
    assert len(set(files)) == 2
    assert server.request("POST", "/stop_profile", admin=True).status == 200

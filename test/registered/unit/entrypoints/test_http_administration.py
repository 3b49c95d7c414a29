"""The endpoints on an engine that echoes: information, probes, keys, administration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rigs.servers.fake_engine import CONTEXT_LEN, FrontServer, front_server
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.engine import describe_model
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    FlushCacheReqInput,
    SessionReqInput,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def test_information_is_served_on_all_its_paths(server: FrontServer, client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.head("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        assert client.get(path).json()["model_path"] == "dummy"
    for path in ("/server_info", "/get_server_info"):
        info = client.get(path).json()
        assert info["served_model_name"] == "echo"
        assert info["internal_states"][0]["num_running_reqs"] == 0
    assert client.get("/get_load").json()[0]["num_reqs"] == 0
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("echo", CONTEXT_LEN)
    assert client.get("/v1/models/echo").json()["id"] == "echo"


def test_a_model_is_described_by_sglangs_fields() -> None:
    args = ServerArgs().resolve()
    assert args.model_path is not None
    sizes = {"max_req_input_len": 9, "max_total_num_tokens": 64}
    info = describe_model(args, ModelConfig.from_path(args.model_path), sizes)
    expected = {
        "model_path": args.model_path,
        "tokenizer_path": args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **sizes,
    }
    assert info.items() >= expected.items()


def test_probes_that_come_together_or_soon_after_are_one_request() -> None:
    with front_server() as server:
        # A machine under load may take more than the second for which an answer is fresh.
        server.context.probe._fresh_seconds = 600.0
        server.scheduler.hold.set()
        statuses: list[int] = []

        def probe() -> None:
            statuses.append(httpx.get(f"{server.url}/health_generate", timeout=20).status_code)

        threads = [threading.Thread(target=probe) for _ in range(20)]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(server.scheduler.running) == 1, 30)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{server.url}/health_generate", timeout=httpx.Timeout(20, read=0.2))
        server.scheduler.hold.clear()
        for thread in threads:
            thread.join()
        probe()
        assert statuses == [200] * 21
        assert len(server.requests) == 1


def test_flush_waits_as_long_as_asked(server: FrontServer, client: httpx.Client) -> None:
    assert client.post("/flush_cache?timeout=2.5").status_code == 200
    message = server.scheduler.received[-1]
    assert isinstance(message, FlushCacheReqInput)
    assert message.timeout == 2.5
    server.scheduler.control_success = False
    try:
        response = client.post("/flush_cache")
    finally:
        server.scheduler.control_success = True
    assert response.status_code == 400
    assert "running 1" in response.json()["error"]["message"]
    assert client.get("/flush_cache").status_code == 405


def test_routers_read_where_events_are(client: httpx.Client) -> None:
    assert client.get("/server_info").json()["kv_events"] is None
    config = '{"endpoint": "tcp://[::1]:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}'
    with front_server(kv_events_config=config, page_size=16) as server:
        assert httpx.get(f"{server.url}/server_info").json()["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": "::1",
            "endpoint_port_base": 5557,
            "topic": "kv",
            "block_size": 16,
            "dp_size": 1,
            "replay_endpoint_port_base": 5558,
        }
    paths = KVEventsConfig(endpoint="ipc:///run/events").describe(1)
    assert paths["endpoint_host"] is paths["endpoint_port_base"] is None
    assert paths["replay_endpoint_port_base"] is None


ADMINISTRATION = [
    ("GET", "/hicache/storage-backend", None),
    ("PUT", "/hicache/storage-backend", {"hicache_storage_backend": "file"}),
    ("DELETE", "/hicache/storage-backend", None),
    ("POST", "/hicache/storage-backend/clear", None),
]
OPTIONAL = [("POST", "/flush_cache", None), ("POST", "/abort_request", {"rid": "x"})]


def statuses(server: FrontServer, key: str | None, requests: list[Any]) -> set[int]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {
        httpx.request(method, f"{server.url}{path}", json=body, headers=headers).status_code
        for method, path, body in requests
    }


def test_without_admin_key_administration_is_refused_by_name(
    server: FrontServer, client: httpx.Client
) -> None:
    assert statuses(server, None, ADMINISTRATION) == {400}
    response = client.get("/hicache/storage-backend")
    assert "--admin-api-key" in response.json()["error"]["message"]
    assert statuses(server, None, OPTIONAL) == {200}


def test_administration_needs_the_admin_key_if_there_are_both() -> None:
    with front_server(api_key="user", admin_api_key="admin") as server:
        for key, status in ((None, 401), ("wrong", 401), ("user", 403)):
            assert statuses(server, key, ADMINISTRATION + OPTIONAL) == {status}
        assert statuses(server, "admin", ADMINISTRATION + OPTIONAL) == {200}
        assert statuses(server, None, [("POST", "/generate", {"text": "a"})]) == {401}
        assert statuses(server, "user", [("POST", "/generate", {"text": "a"})]) == {200}
        assert statuses(server, None, [("GET", "/health", None)]) == {200}
        attached = [
            m for m in server.scheduler.received if isinstance(m, AttachHiCacheStorageReqInput)
        ]
        assert attached[0].hicache_storage_backend == "file"
        info = httpx.get(f"{server.url}/server_info", headers={"Authorization": "Bearer user"})
        assert '"user"' not in info.text
        assert '"admin"' not in info.text


CONTROLS = [
    ("POST", f"/{name}", None)
    for name in ("pause_generation", "continue_generation", "start_profile", "stop_profile")
]


def test_who_may_pause_and_profile(server: FrontServer, client: httpx.Client) -> None:
    """Only the admin key allows it: otherwise any page in a browser could stop the server."""
    assert statuses(server, None, CONTROLS) == {403}
    assert "--admin-api-key" in client.post("/pause_generation").json()["error"]["message"]
    with front_server(api_key="user", admin_api_key="admin") as other:
        for key, status in ((None, 401), ("wrong", 401), ("user", 403), ("admin", 200)):
            assert statuses(other, key, CONTROLS) == {status}
        sessions = [("POST", "/close_session", {"session_id": "s"}), ("POST", "/open_session", {})]
        for key, status in ((None, 401), ("admin", 403), ("user", 200)):
            assert statuses(other, key, sessions) == {status}
        assert statuses(other, None, [("GET", "/ready", None)]) == {200}


@pytest.fixture(name="admin")
def make_admin() -> Iterator[tuple[FrontServer, httpx.Client]]:
    with front_server(admin_api_key="admin") as server:
        headers = {"Authorization": "Bearer admin"}
        with httpx.Client(base_url=server.url, timeout=20, headers=headers) as http:
            yield server, http


def asking(server: FrontServer, answers: list[httpx.Response]) -> threading.Thread:
    """A request, which the scheduler has."""
    before = len(server.scheduler.running)

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=20))

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: len(server.scheduler.running) > before, 30)
    return thread


def test_a_paused_server_is_alive_and_not_ready(admin: tuple[FrontServer, httpx.Client]) -> None:
    server, http = admin
    assert http.get("/ready").status_code == 200
    answers: list[httpx.Response] = []
    assert http.post("/pause_generation", json={}).status_code == 200
    thread = asking(server, answers)
    for path, status in (("/health", 200), ("/ready", 503), ("/health_generate", 503)):
        response = http.get(path)
        assert response.status_code == status
        assert status == 200 or "/continue_generation" in response.json()["error"]["message"]
    assert http.get("/server_info").status_code == 200
    sent = [type(m).__name__ for m in server.scheduler.received]
    assert sent.count("TokenizedGenerateReqInput") == 1, "a probe asks for no token"
    assert http.post("/continue_generation").status_code == 200
    thread.join()
    assert answers[0].status_code == 200
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("body", [{"abort": True}, {"mode": "abort"}])
def test_a_pause_may_end_what_runs(
    admin: tuple[FrontServer, httpx.Client], body: dict[str, Any]
) -> None:
    server, http = admin
    server.scheduler.hold.set()
    answers: list[httpx.Response] = []
    thread = asking(server, answers)
    assert http.post("/pause_generation", json=body).status_code == 200
    thread.join()
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_what_pauses_and_profiles_cannot_do_is_refused_by_name(
    admin: tuple[FrontServer, httpx.Client],
) -> None:
    server, http = admin
    for path, body, words in (
        ("/pause_generation", {"mode": "retract"}, "use in_place, which keeps the requests"),
        ("/pause_generation", {"mode": "x"}, "mode='x' is not supported: use in_place"),
        ("/start_profile", {"activities": ["CPU", "MEM"]}, "'MEM' is not supported: use CPU and"),
        ("/start_profile", {"output_dir": "/etc"}, "SGLANG_TORCH_PROFILER_DIR"),
        ("/start_profile", {"merge_profiles": True}, "a file of its own"),
        ("/start_profile", {"num_steps": 501}, "num_steps"),
        ("/start_profile", {"with_stack": True}, "py-spy"),
        ("/open_session", {"streaming": True}, "send the whole prompt"),
        ("/open_session", {"session_id": ""}, "session_id"),
        ("/open_session", {"cache_salt": "x" * 5000}, "cache_salt"),
        ("/close_session", {}, "session_id"),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert not server.scheduler.received
    assert http.post("/start_profile", json={"with_stack": False}).json()["num_steps"] == 50
    server.scheduler.control_success = False
    assert http.post("/pause_generation").status_code == 400
    assert http.get("/ready").status_code == 200, "it was refused"


def test_a_draining_server_ends_the_pause() -> None:
    with front_server(admin_api_key="admin") as server:
        headers = {"Authorization": "Bearer admin"}
        assert httpx.post(f"{server.url}/pause_generation", headers=headers).status_code == 200
        answers: list[httpx.Response] = []
        thread = asking(server, answers)
        server.signal()
        thread.join()
        assert answers[0].status_code == 200, "it ends well"


def test_sessions_are_named_by_the_body_the_header_or_the_server(
    server: FrontServer, client: httpx.Client
) -> None:
    def told(path: str, body: dict[str, Any], **headers: str) -> tuple[Any, SessionReqInput]:
        response = client.post(path, json=body, headers=headers)
        assert response.status_code == 200
        message = server.scheduler.received[-1]
        assert isinstance(message, SessionReqInput)
        return response.json(), message

    name, message = told("/open_session", {"capacity_of_str_len": 1000, "timeout": 3.0})
    assert name == message.session_id and len(name) == 32 and not message.is_closed
    keys = {"extra_key": "k", "cache_salt": "s"}
    name, message = told("/open_session", {"session_id": "mine", **keys})
    assert name == message.session_id == "mine"
    assert message.extra_key == combine_extra_key("k", "s")
    _, message = told("/close_session", {}, **{"X-SMG-Routing-Key": "routed"})
    assert (message.session_id, message.is_closed, message.extra_key) == ("routed", True, None)


def test_an_engine_that_died_is_told() -> None:
    with front_server() as server:
        server.scheduler.hold.set()
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/generate", json={"text": "a"}, timeout=20))

        thread = threading.Thread(target=ask)
        thread.start()
        assert wait_until(lambda: bool(server.scheduler.running), 30)
        server.context.manager.fail_all_threadsafe("scheduler fell over")
        thread.join()
        assert answers[0].status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert answers[0].json()["error"]["message"] == "scheduler fell over"

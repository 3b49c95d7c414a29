"""Row F2 on a real server: no endpoint works without the right key, however it is called."""

from __future__ import annotations

import itertools
from typing import Final

import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_server import ADMIN_KEY
from sglang.test.keyed_server import HEADERS, USER_KEY, KeyedServer

register_cpu_ci(est_time=10, suite="base-b-test-cpu")


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
    {"X-Api-Key": USER_KEY},
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
            # None of them gives a user access to administration.
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

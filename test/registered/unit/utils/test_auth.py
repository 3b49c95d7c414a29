"""Keys: the whole matrix of levels, configured keys and presented keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from sglang.srt.entrypoints.http.application import Application, Route
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http_server import BoundedServer
from sglang.srt.utils.auth import (
    AuthDecision,
    AuthLevel,
    add_api_key_middleware,
    app_has_admin_force_endpoints,
    auth_level,
    decide_request_auth,
)
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

NORMAL, OPTIONAL, FORCE = AuthLevel.NORMAL, AuthLevel.ADMIN_OPTIONAL, AuthLevel.ADMIN_FORCE
OPEN = {"none", "user", "admin"}
USER, ADMIN, NOBODY = {"user"}, {"admin"}, set[str]()


def decide(
    level: AuthLevel,
    header: str | None,
    *,
    api_key: str | None = "user",
    admin_api_key: str | None = "admin",
    method: str = "POST",
    path: str = "/generate",
) -> AuthDecision:
    return decide_request_auth(
        method=method,
        path=path,
        authorization_header=header,
        api_key=api_key,
        admin_api_key=admin_api_key,
        auth_level=level,
    )


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "normal", "optional", "force"),
    [
        (None, None, OPEN, OPEN, NOBODY),
        ("user", None, USER, USER, NOBODY),
        (None, "admin", OPEN, ADMIN, ADMIN),
        ("user", "admin", USER, ADMIN, ADMIN),
        ("", "", OPEN, OPEN, NOBODY),
    ],
)
def test_each_key_passes_where_the_table_says(
    api_key: str | None,
    admin_api_key: str | None,
    normal: set[str],
    optional: set[str],
    force: set[str],
) -> None:
    for level, passing in ((NORMAL, normal), (OPTIONAL, optional), (FORCE, force)):
        for who in OPEN:
            header = None if who == "none" else f"Bearer {who}"
            decision = decide(level, header, api_key=api_key, admin_api_key=admin_api_key)
            assert decision.allowed == (who in passing), (level, who)


@pytest.mark.parametrize(
    ("level", "key", "status", "words"),
    [
        (NORMAL, None, 401, "no key"),
        (NORMAL, "wrong", 401, "wrong key"),
        (NORMAL, "admin", 403, "needs the API key, and this is the admin key"),
        (OPTIONAL, None, 401, "no key"),
        (OPTIONAL, "wrong", 401, "wrong key"),
        (OPTIONAL, "user", 403, "needs the admin key, and this is the API key"),
        (FORCE, "wrong", 401, "wrong key"),
        (FORCE, "user", 403, "needs the admin key, and this is the API key"),
    ],
)
def test_a_wrong_key_gets_401_and_a_key_of_the_wrong_kind_403(
    level: AuthLevel, key: str | None, status: int, words: str
) -> None:
    decision = decide(level, None if key is None else f"Bearer {key}")
    assert (decision.allowed, decision.error_status_code) == (False, status)
    assert words in decision.reason


def test_an_endpoint_that_no_key_opens_answers_403() -> None:
    decision = decide(FORCE, "Bearer user", admin_api_key=None)
    assert (decision.allowed, decision.error_status_code) == (False, 403)
    assert "--admin-api-key" in decision.reason


def test_equal_keys_of_both_kinds_open_both() -> None:
    for level in (NORMAL, OPTIONAL, FORCE):
        assert decide(level, "Bearer one", api_key="one", admin_api_key="one").allowed


@pytest.mark.parametrize(
    "header", ["user", "Basic user", "Bearer", "Bearer ", "Bearer userx", "Bearer use", "Bearer ü"]
)
def test_malformed_headers_do_not_pass(header: str) -> None:
    assert not decide(NORMAL, header).allowed


def test_the_scheme_is_case_insensitive() -> None:
    assert decide(NORMAL, "bearer user").allowed


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/metrics"])
def test_probes_need_no_key(path: str) -> None:
    assert decide(NORMAL, None, method="GET", path=path).allowed
    assert not decide(NORMAL, None, method="GET", path=path + "x").allowed


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/metrics/", True), ("/metrics/engine", True), ("/metrics_all", False),
        ("/health/", False), ("/v1/metrics/", False),
    ],
)  # fmt: skip
def test_paths_below_metrics_need_no_key(path: str, is_open: bool) -> None:
    for level in (NORMAL, OPTIONAL):
        assert decide(level, None, method="GET", path=path).allowed is is_open


def test_preflights_need_no_key() -> None:
    assert decide(FORCE, None, method="OPTIONS").allowed


@pytest.fixture
def app() -> Application:
    async def normal(request: Request) -> Response:
        return Response()

    @auth_level(OPTIONAL)
    async def admin(request: Request) -> Response:
        return Response()

    return Application(
        [
            Route("/open", normal, methods=["GET"]),
            Route("/admin", admin, methods=["POST"]),
        ]
    )


@contextmanager
def served(app: Application) -> Iterator[httpx.Client]:
    server = BoundedServer(app, port=get_free_port())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_until(lambda: server.started, 30)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(app: Application) -> Iterator[httpx.Client]:
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")
    with served(app) as client:
        yield client


def test_middleware_applies_the_level_of_the_route(client: httpx.Client) -> None:
    user, admin = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}
    assert client.get("/open").status_code == 401
    assert client.get("/open", headers=user).status_code == 200
    assert client.post("/admin", headers=user).status_code == 403
    assert client.post("/admin", headers=admin).status_code == 200
    # A wrong method counts as the route, not as an open path.
    assert client.get("/admin").status_code == 401
    assert client.get("/nowhere").status_code == 401
    refused = client.get("/open")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer" in refused.json()["error"]["message"]


def test_admin_force_endpoints_are_found(app: Application) -> None:
    assert not app_has_admin_force_endpoints(app)

    @auth_level(FORCE)
    async def force(request: Request) -> Response:
        return Response()

    forced = Application([*app.routes, Route("/force", force, methods=["POST"])])
    assert app_has_admin_force_endpoints(forced)

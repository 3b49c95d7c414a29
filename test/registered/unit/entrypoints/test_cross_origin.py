"""Pages of other origins: what a browser asks before and sees after, byte for byte on a socket."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping

import pytest

from rigs.servers.fake_engine import FrontServer, front_server
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

USER, ADMIN = "page-user", "page-admin"
PAGE = "https://page.example"
KEYED = {"Authorization": f"Bearer {USER}"}
ALL = "access-control-allow-origin"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(api_key=USER, admin_api_key=ADMIN, enable_metrics=True) as running:
        yield running


class Reply:
    """Status, headers by lower-case name, and the whole body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def page_may_read(self) -> bool:
        """True if a browser lets a page read the answer to a request without cookies."""
        return self.headers.get(ALL) in ("*", PAGE)


def ask(
    server: FrontServer,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: object = None,
) -> Reply:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, dict(headers or {}))
        return Reply(connection.getresponse())
    finally:
        connection.close()


def preflight(server: FrontServer, path: str, method: str, **more: str) -> Reply:
    """Send a preflight as a browser does: without the key, which it asks permission to send."""
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return ask(server, "OPTIONS", path, headers | more)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("PUT", "/generate"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("DELETE", "/hicache/storage-backend"),
    ],
)
def test_a_preflight_needs_no_key(server: FrontServer, method: str, path: str) -> None:
    reply = preflight(server, path, method)
    assert reply.status == 200
    assert reply.page_may_read
    assert method in reply.headers["access-control-allow-methods"].split(", ")
    allowed = reply.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "content-type"} <= set(allowed)


def test_nothing_lets_a_page_send_cookies_along(server: FrontServer) -> None:
    for reply in (
        preflight(server, "/generate", "POST"),
        ask(server, "GET", "/v1/models", {"Origin": PAGE, **KEYED}),
    ):
        assert "access-control-allow-credentials" not in reply.headers
        assert reply.headers[ALL] == "*"


def test_a_method_that_no_endpoint_has_and_a_private_network_are_refused(
    server: FrontServer,
) -> None:
    assert preflight(server, "/generate", "PATCH").status == 400
    private = {"Access-Control-Request-Private-Network": "true"}
    assert preflight(server, "/generate", "POST", **private).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_with_the_key_reads_answers_and_streams(server: FrontServer, stream: bool) -> None:
    headers = {"Origin": PAGE, "Content-Type": "application/json", **KEYED}
    reply = ask(server, "POST", "/generate", headers, {"text": "hello", "stream": stream})
    assert (reply.status, reply.page_may_read) == (200, True)
    assert (b"data: [DONE]" in reply.body) == stream


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/generate", {}, {"text": "a"}, 401),
        ("POST", "/generate", {"Authorization": "Bearer wrong"}, {"text": "a"}, 401),
        ("POST", "/flush_cache", KEYED, None, 403),
        ("POST", "/generate", KEYED, {"text": ""}, 400),
        ("GET", "/generate", KEYED, None, 405),
        ("GET", "/nowhere", KEYED, None, 404),
    ],
)
def test_a_page_reads_why_it_was_refused(
    server: FrontServer,
    method: str,
    path: str,
    headers: dict[str, str],
    body: object,
    status: int,
) -> None:
    reply = ask(server, method, path, {"Origin": PAGE, **headers}, body)
    assert (reply.status, reply.page_may_read) == (status, True)
    assert json.loads(reply.body)["error"]["message"]


def test_an_origin_is_no_key(server: FrontServer) -> None:
    """An origin opens nothing, and an OPTIONS request does nothing."""
    for origin in (PAGE, "null", "", server.url):
        assert ask(server, "POST", "/generate", {"Origin": origin}, {"text": "a"}).status == 401
    before = len(server.scheduler.received)
    for headers in ({}, {"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):
        assert ask(server, "OPTIONS", "/flush_cache", headers).status == 405
    assert preflight(server, "/flush_cache", "POST").status == 200
    assert len(server.scheduler.received) == before


def test_without_an_origin_nothing_of_it_is_in_the_answer(server: FrontServer) -> None:
    for path in ("/v1/models", "/health", "/nowhere"):
        reply = ask(server, "GET", path, KEYED)
        assert "vary" not in reply.headers
        assert not [name for name in reply.headers if name.startswith("access-control-")]

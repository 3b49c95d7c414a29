"""`GET /hicache`: who gets the page, who gets the data, and how often the scheduler is asked."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, front_server
from sglang.srt.messages.io_struct import GetCacheViewReq
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
JSON = "application/json"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(api_key="user", admin_api_key="admin") as running:
        yield running


def ask(server: FrontServer, accept: str, key: str | None = None) -> httpx.Response:
    headers = {"Accept": accept}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.get(f"{server.url}/hicache", headers=headers, timeout=20)


def num_questions(server: FrontServer) -> int:
    return sum(isinstance(one, GetCacheViewReq) for one in server.scheduler.received)


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("user", 403)])
def test_a_refused_browser_gets_the_page_without_data(
    server: FrontServer, key: str | None, status: int
) -> None:
    before = num_questions(server)
    page = ask(server, BROWSER, key)
    assert page.status_code == status
    assert page.text == ask(server, BROWSER, "admin").text
    assert ("WWW-Authenticate" in page.headers) == (status == 401)
    data = ask(server, JSON, key)
    assert data.status_code == status
    assert data.json()["error"]["type"] == "authentication_error"
    assert num_questions(server) == before


def test_the_admin_key_gets_both(server: FrontServer) -> None:
    page = ask(server, "*/*", "admin")
    assert page.status_code == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    data = ask(server, JSON, "admin")
    assert data.status_code == 200
    assert data.headers["Cache-Control"] == "no-store"
    assert data.json()["num_running_reqs"] == 0


def test_without_keys_all_get_the_data() -> None:
    with front_server() as open_server:
        assert ask(open_server, JSON).status_code == 200
        assert ask(open_server, BROWSER).status_code == 200


def test_other_endpoints_refuse_browsers_with_json(server: FrontServer) -> None:
    answer = httpx.get(f"{server.url}/server_info", headers={"Accept": BROWSER}, timeout=20)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401


def test_the_page_is_alone_and_its_policy_lets_nothing_else_in(server: FrontServer) -> None:
    page = ask(server, BROWSER, "admin")
    addresses = set(re.findall(r"""[a-z]+:?//[^\s"'<]+""", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name of SVG, which nothing loads"
    assert not re.search(r"<(link|img|iframe|base)\b|\ssrc=|innerHTML|\son\w+=", page.text)
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_many_askers_are_one_question_a_second(server: FrontServer) -> None:
    before, began = num_questions(server), time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server, JSON, "admin"), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert num_questions(server) - before <= 2 + time.monotonic() - began

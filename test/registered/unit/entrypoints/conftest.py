"""A server over an engine that echoes, for test files that do not start their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, front_server


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FrontServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http

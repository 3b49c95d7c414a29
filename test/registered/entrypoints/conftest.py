"""A server with both keys, for test files that do not start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.servers.keyed_server import KeyedServer, keyed_server, serves_on


@pytest.fixture(scope="module", name="server")
def start_keyed_server() -> Iterator[KeyedServer]:
    with keyed_server() as running:
        yield running


@pytest.fixture(name="server_serves_on")
def check_that_the_server_serves_on(server: KeyedServer) -> Iterator[None]:
    """Check that the same processes answer a normal request after the test."""
    with serves_on(server):
        yield

"""A server with both keys and a real store, for tests of hostile and careless clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import psutil

from rigs.servers.engine_server import ADMIN_KEY
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster

USER_KEY: Final = "test-user-key"
HEADERS: Final = {"Authorization": f"Bearer {USER_KEY}"}
ADMIN: Final = {"Authorization": f"Bearer {ADMIN_KEY}"}


class KeyedServer(ForkedServer):
    """A server with both keys; its methods send the right ones."""

    def __init__(self, *args: str, **options: Any) -> None:
        super().__init__("--api-key", USER_KEY, *args, **options)

    def __enter__(self) -> KeyedServer:
        self.start()
        return self

    def ask(self, prompt: list[int] | None = None, **fields: Any) -> httpx.Response:
        """Generate two tokens after `prompt`, as a user."""
        params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        body = {"input_ids": prompt or [300, 301], "sampling_params": params, **fields}
        return httpx.post(f"{self.url}/generate", json=body, headers=HEADERS, timeout=60)

    def call(self, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """Call any endpoint, as an operator unless `headers` has another key."""
        return httpx.request(method, self.url + path, headers=headers or ADMIN, timeout=60)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def log(self) -> str:
        """The log of all processes so far."""
        return self.process.log_path.read_text(errors="replace")

    def members(self) -> list[psutil.Process]:
        """The server's processes, its main process first."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextmanager
def keyed_server() -> Iterator[KeyedServer]:
    """A server with metrics and its own Mooncake Store."""
    flags = ("--hicache-storage-backend", "mooncake", "--enable-metrics")
    with (
        MooncakeCluster(segment_size="64mb") as cluster,
        KeyedServer(*flags, env=cluster.engine_env()) as server,
    ):
        yield server


@contextmanager
def serves_on(server: KeyedServer) -> Iterator[None]:
    """Check that after the block the same processes answer a normal request."""
    before = {member.pid for member in server.members()}
    yield
    answer = server.ask()
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["output_ids"]) == 2
    assert before <= {member.pid for member in server.members()}

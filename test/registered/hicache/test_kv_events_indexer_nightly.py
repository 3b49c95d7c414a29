"""Dynamo's KV indexer (PyPI's `ai-dynamo-runtime`) hears the events of two servers."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import get_free_port, get_free_ports, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=120, suite="nightly-test-cpu", nightly=True)

PACKAGES = Path(sys.prefix) / "indexer"
"""Where `scripts/nightly.sh` installs the package: servers would use its `uvloop`."""
PAGE = 16
SHORT, LONG, OTHER = prompt(1, 65), prompt(1, 161), prompt(2, 200)


class Indexer:
    """A running indexer, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, body: object = None) -> Any:
        """The answer; None: there is no indexer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read() or b"null")
        except (urllib.error.URLError, ConnectionError):
            return None

    def tokens(self, ids: list[int]) -> dict[int, tuple[int, int, int]]:
        """The length of the longest cached prefix of `ids`, by server: in L1, in L1 and L2, in all
        tiers."""
        found = self.ask("/query", {"token_ids": ids, "model_name": "tiny"})["instances"]
        return {int(name): (one["gpu"], one["cpu"], one["disk"]) for name, one in found.items()}


@contextmanager
def running_indexer(folder: Path) -> Iterator[Indexer]:
    assert PACKAGES.is_dir(), f"no {PACKAGES}: run scripts/nightly.sh, which installs it"
    port = get_free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    env = child_environment({"PYTHONPATH": str(PACKAGES)})
    with (folder / "indexer.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        indexer = Indexer(f"http://127.0.0.1:{port}")
        assert wait_until(lambda: indexer.ask("/workers") == [], 60), process.poll()
        yield indexer
    finally:
        process.kill()
        process.wait()


def flags(endpoint: str, replay: str) -> list[str]:
    config = json.dumps({"endpoint": endpoint, "replay_endpoint": replay})
    values = {
        "tokenizer-path": BUILTIN_MODEL_DIR, "device": "cpu", "page-size": PAGE,
        "max-total-tokens": 256, "hicache-ratio": 4, "kv-events-config": config,
        "hicache-storage-backend": "file", "served-model-name": "tiny",
    }  # fmt: skip
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def test_it_finds_the_longest_prefix_of_two_servers_in_all_tiers(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "llama")
    ports = [f"tcp://127.0.0.1:{port}" for port in get_free_ports(4)]
    sockets = [(ports[0], ports[1]), (ports[2], ports[3])]
    servers = [
        EngineServer(
            *flags(*pair),
            model=str(tmp_path),
            env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / f"l3-{number}")},
        )
        for number, pair in enumerate(sockets)
    ]
    with running_indexer(tmp_path) as indexer, ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start(300)
        for number, (endpoint, replay) in enumerate(sockets):
            if number:  # It joins later, and asks for what it missed.
                servers[number].generate(LONG, max_new_tokens=1)
            worker = {
                "instance_id": number,
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "model_name": "tiny",
                "block_size": PAGE,
            }
            assert indexer.ask("/register", worker) == {"status": "ok"}

        def hears() -> bool:
            states = [one["listeners"]["0"]["status"] for one in indexer.ask("/workers")]
            return states == ["active", "active"]

        assert wait_until(hears, 30)
        servers[0].generate(SHORT, max_new_tokens=1)
        servers[1].generate(OTHER, max_new_tokens=1)

        def becomes(wanted: dict[int, tuple[int, int, int]]) -> bool:
            return wait_until(lambda: indexer.tokens(LONG) == wanted, 30)

        # The 256 tokens of L1 do not hold both prompts of the second server.
        assert becomes({0: (64, 64, 64), 1: (0, 160, 160)}), indexer.tokens(LONG)
        for server in servers:
            server.flush()
        assert becomes({0: (0, 0, 64), 1: (0, 0, 160)}), indexer.tokens(LONG)
        reply = servers[1].request("POST", "/hicache/storage-backend/clear", admin=True)
        assert reply.status == 200, reply
        assert becomes({0: (0, 0, 64)}), indexer.tokens(LONG)
        assert [server.stop() for server in servers] == [0, 0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))

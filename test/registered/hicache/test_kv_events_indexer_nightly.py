"""Dynamo's KV indexer (PyPI's `ai-dynamo-runtime`) hears the events of two servers, and of caches
with keys."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import CacheRig
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.kv_events import ZmqEventPublisher
from sglang.srt.environ import child_environment
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.utils.network import get_free_port, get_free_ports, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=120, suite="nightly-test-cpu", nightly=True)

PACKAGES = Path(sys.prefix) / "indexer"
"""Folder in which `scripts/nightly.sh` installs the package; servers would use its `uvloop`."""
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

    def tokens(self, ids: list[int], **key: str | None) -> dict[int, tuple[int, int, int]]:
        """The length of the longest cached prefix of `ids`, by server: in L1, in L1 and L2, in all
        tiers. `key` may have `cache_salt` and `lora_name`."""
        query = {"token_ids": ids, "model_name": "tiny", **key}
        found = self.ask("/query", query)["instances"]
        return {int(name): (one["gpu"], one["cpu"], one["disk"]) for name, one in found.items()}

    def register(self, number: int, endpoint: str, replay: str) -> None:
        worker = {
            "instance_id": number,
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "model_name": "tiny",
            "block_size": PAGE,
        }
        assert self.ask("/register", worker) == {"status": "ok"}

    def states(self) -> list[str]:
        """The state of the connection to each server."""
        return [one["listeners"]["0"]["status"] for one in self.ask("/workers")]


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
            if number:  # The indexer joins later, and asks for the events that it missed.
                servers[number].generate(LONG, max_new_tokens=1)
            indexer.register(number, endpoint, replay)
        assert wait_until(lambda: indexer.states() == ["active", "active"], 30)
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


KEYS: list[tuple[str | None, str | None]] = [
    (None, None), ("a", None), ("b", None), (None, "a"), ("a", "a"), ("", None), (None, ""),
]  # fmt: skip
"""Pairs of `extra_key` and `cache_salt`."""


@pytest.mark.parametrize("keyed", [False, True], ids=["plain alone", "keyed"])
def test_equal_tokens_under_other_keys_are_not_mixed_up(tmp_path: Path, keyed: bool) -> None:
    """A cache holds the prompts of some keys, never all; the indexer has those, and no other."""
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in get_free_ports(2))
    publisher = ZmqEventPublisher(KVEventsConfig(endpoint=endpoint, replay_endpoint=replay))
    rig = CacheRig(l1_pages=64, page_size=PAGE, kv_events=True, announce_keyed=keyed)

    def told(key: tuple[str | None, str | None]) -> int:
        """Tokens that the indexer finds under `key`."""
        names = {"lora_name": key[0], "cache_salt": key[1]}
        return indexer.tokens(IDS, **names).get(0, (0,))[0]

    def has(ids: list[int]) -> bool:
        return indexer.tokens(ids) != {}

    def wanted(holds: list[tuple[str | None, str | None]]) -> dict[Any, int]:
        plain = len(IDS) * ((None, None) in holds)
        own = {key: len(IDS) * (keyed and key in holds) for key in KEYS}
        # The indexer takes an empty text for none.
        return {key: plain if key in ((None, None), ("", None), (None, "")) else own[key]
                for key in KEYS}  # fmt: skip

    IDS = [*range(1, 4 * PAGE + 1)]
    with running_indexer(tmp_path) as indexer:
        indexer.register(0, endpoint, replay)
        assert wait_until(lambda: indexer.states() == ["active"], 30)
        # Tokens of a prompt that is always there: earlier events have come once it is found.
        for step, holds in enumerate([KEYS[1:], KEYS, KEYS[:1], KEYS[2:], []]):
            rig.flush()
            for key in holds:
                # The indexer ignores sessions.
                session = None if step % 2 else "agent"
                rig.run([*IDS, 7], extra_key=combine_extra_key(*key), session=session)
            mark = [1000 + step] * PAGE
            rig.run([*mark, 7])
            publisher.publish(rig.tree.take_events())
            assert wait_until(partial(has, mark), 30)
            assert {key: told(key) for key in KEYS} == wanted(holds)
    publisher.shutdown()

"""Pictures of `GET /hicache` of a real server under load, as the tests and the docs want them."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rigs.servers.chromium import Chromium, Scheme
from rigs.servers.engine_server import ADMIN_KEY, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_HYBRID_MODEL_NAME
from sglang.srt.environ import envs

PAGE: Final = 64
SIZES: Final = {"wide": 1280, "narrow": 390}
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
_CLIENTS: Final = 3
_SYSTEM_PROMPTS: Final = 12
_NAMES: Final = ("otter", "badger", "falcon", "raven", "tiger", "heron")


def _facts(own: random.Random, count: int) -> str:
    """`count` sentences, about ten tokens each."""
    return "".join(
        f"The code of {own.choice(_NAMES)} is {own.randrange(1000, 10_000)}. " for _ in range(count)
    )


@contextlib.contextmanager
def server_under_load(num_requests: int) -> Iterator[EngineServer]:
    """A server of the built-in hybrid that drafts, with three tiers that all are in use, while
    clients go on asking, two as tenants. Their prompts share a few beginnings, some often.
    `num_requests` have ended at the begin."""
    begins = [_facts(random.Random(seed), 60) for seed in range(_SYSTEM_PROMPTS)]
    stop, done = threading.Event(), threading.Semaphore(0)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ForkedServer(
            "--enable-metrics", "--hicache-storage-backend", "file", "--page-size", str(PAGE),
            "--max-total-tokens", str(64 * PAGE), "--hicache-ratio", "2",
            "--max-mamba-cache-size", "32", "--speculative-algorithm", "NEXTN",
            "--served-model-name", BUILTIN_HYBRID_MODEL_NAME, model=str(BUILTIN_HYBRID_MODEL_DIR),
            env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: folder},
        ) as server,
    ):  # fmt: skip

        def ask(seed: int) -> None:
            own = random.Random(seed)
            while not stop.is_set():
                begin = begins[min(int(own.expovariate(0.35)), _SYSTEM_PROMPTS - 1)]
                facts = begin + _facts(own, own.randrange(30))
                ask_for = own.choice(_NAMES)
                content = f"{facts}The code of {ask_for} is 7391. What is the code of {ask_for}?"
                server.request("POST", "/v1/chat/completions", {
                    "messages": [{"role": "user", "content": content}], "max_tokens": 8,
                    "temperature": 0, "cache_salt": f"client {seed}" if seed else None,
                })  # fmt: skip
                done.release()
                stop.wait(0.5 * own.random())

        clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(_CLIENTS)]
        for client in clients:
            client.start()
        try:
            for _ in range(num_requests):
                assert done.acquire(timeout=120), "the clients have ended"
            yield server
        finally:
            stop.set()
            for client in clients:
                client.join()


def give_key(browser: Chromium) -> None:
    """Wait until the page asks for the key, and give it."""
    browser.wait_for("document.readyState == 'complete' && !document.getElementById('ask').hidden")
    browser.evaluate(
        f"document.getElementById('key').value = '{ADMIN_KEY}';"
        "document.querySelector('#login button').click()"
    )


def show(browser: Chromium, server: EngineServer, scheme: Scheme, width: int) -> None:
    """Open the page, give it the key, and wait until it shows all tiers."""
    browser.prefer(scheme)
    browser.open(f"{server.url}/hicache", width=width)
    give_key(browser)
    browser.wait_for(
        "!document.getElementById('view').hidden"
        " && [...document.querySelectorAll('#tiers .row')].length == 5"
        " && document.querySelectorAll('#tiers .unknown').length == 0"
    )


def take_pictures(browser: Chromium, server: EngineServer, folder: Path) -> list[Path]:
    """Write `hicache-SCHEME-SIZE.png` for each scheme and size to `folder`."""
    pictures = []
    for scheme in SCHEMES:
        for size, width in SIZES.items():
            show(browser, server, scheme, width)
            path = folder / f"hicache-{scheme}-{size}.png"
            path.write_bytes(browser.screenshot())
            pictures.append(path)
    return pictures

"""Servers behind a router that are restarted one after the other, under load.

The load asks questions with known answers, whole and streamed, of all lengths. A request counts as
failed unless its client gets the right words.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from rigs.servers.engine_server import EngineServer
from sglang.embedded_router import Router
from sglang.srt.constants import BUILTIN_MODEL_NAME
from sglang.srt.utils.network import wait_until

NAMES: Final = ("heron", "otter", "badger", "falcon", "raven")
LONG_TOKENS: Final = 200
_START_S: Final = 120.0
_TIMEOUT_S: Final = 120.0
_NOTICED_S: Final = 60.0
_MOST_AT_ONCE: Final = 12
"""Requests under way: a machine that is slower than the rate gathers no backlog."""
_BETWEEN: Final = 8
"""Requests between two restarts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that its client did not get the right answer to."""

    number: int
    seconds: float
    what: str


class Load:
    """Context manager: sends up to `rate` requests a second to `url`, each in a thread of its own,
    until its end; then all have ended."""

    def __init__(self, url: str, rate: float) -> None:
        self._url = url
        self._rate = rate
        self._stop = threading.Event()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._clients: list[threading.Thread] = []
        self._sender = threading.Thread(target=self._send_all, name="load")
        self.seconds: list[float] = []
        """Seconds of each request that got its answer."""
        self.failures: list[Failure] = []

    def __enter__(self) -> Load:
        self._sender.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._sender.join()
        for client in self._clients:
            client.join()

    @property
    def num_sent(self) -> int:
        """Requests sent so far."""
        return len(self._clients)

    def _send_all(self) -> None:
        while not self._stop.wait(1 / self._rate):
            self._room.acquire()
            client = threading.Thread(target=self._ask, args=(len(self._clients),))
            client.start()
            self._clients.append(client)

    def _ask(self, number: int) -> None:
        began = time.monotonic()
        try:
            wrong = _long(self._url) if number % 7 == 6 else _question(self._url, number)
        except httpx.HTTPError as error:
            wrong = repr(error)
        finally:
            self._room.release()
        seconds = time.monotonic() - began
        if wrong:
            self.failures.append(Failure(number, seconds, wrong))
        else:
            self.seconds.append(seconds)


def _question(url: str, number: int) -> str:
    """Ask for a code, in a stream every other time; what is wrong with the answer, or ""."""
    codes = {name: f"{(number * 7919 + at * 104729) % 10000:04}" for at, name in enumerate(NAMES)}
    name = NAMES[number % len(NAMES)]
    facts = " ".join(f"The code of {one} is {code}." for one, code in codes.items())
    question = [{"role": "user", "content": f"{facts} What is the code of {name}?"}]
    body = {
        "model": BUILTIN_MODEL_NAME,
        "messages": question,
        "temperature": 0,
        "stream": number % 2 == 1,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        return f"{reply.status_code} {reply.text[:300]}"
    if not body["stream"]:
        text = reply.json()["choices"][0]["message"]["content"]
    else:
        *events, done = _events(reply)
        if done != "[DONE]":
            return f"the stream ends with {done[:300]}"
        chunks = [json.loads(event) for event in events]
        if any("error" in chunk for chunk in chunks):
            return f"the stream ends with {events[-1][:300]}"
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return "" if text == codes[name] else f"{text!r} in place of {codes[name]}"


def _long(url: str) -> str:
    """Ask for a stream that takes a while; what is wrong with it, or ""."""
    params = {"temperature": 0, "max_new_tokens": LONG_TOKENS, "ignore_eos": True}
    body = {"text": "The code of", "sampling_params": params, "stream": True}
    reply = httpx.post(f"{url}/generate", json=body, timeout=_TIMEOUT_S)
    *events, done = _events(reply)
    if reply.status_code != 200 or done != "[DONE]":
        return f"{reply.status_code} {reply.text[-300:]}"
    last: dict[str, Any] = json.loads(events[-1])
    if last.get("meta_info", {}).get("completion_tokens") != LONG_TOKENS:
        return f"the stream ends with {events[-1][-300:]}"
    return ""


def _events(reply: httpx.Response) -> list[str]:
    parts = (part.removeprefix("data: ") for part in reply.text.split("\n\n"))
    return [part for part in parts if part] or [""]


def _is_healthy(router: Router, url: str) -> bool:
    """True if the router's last probes found the server at `url` healthy."""
    reply = httpx.get(f"{router.url}/workers", timeout=_TIMEOUT_S)
    return any(one["url"] == url and one["is_healthy"] for one in reply.json()["workers"])


def restart_each(load: Load, router: Router, servers: Sequence[EngineServer]) -> None:
    """Stop each server with SIGTERM, and start it again; the next one follows once the router sends
    requests to it.

    Raises:
        AssertionError: A server does not end by itself with status 0, or the router does not notice
            that it is back.
    """
    for server in servers:
        sent = load.num_sent
        assert server.stop(signal.SIGTERM, _TIMEOUT_S) == 0, server.process.log_tail()
        assert "Traceback" not in server.process.log_path.read_text(errors="replace")
        assert load.num_sent > sent, "nothing was sent while it ended"
        server.start(_START_S)
        assert wait_until(lambda url=server.url: _is_healthy(router, url), _NOTICED_S)  # type: ignore[misc]
        sent = load.num_sent
        assert wait_until(lambda sent=sent: load.num_sent >= sent + _BETWEEN, _NOTICED_S)  # type: ignore[misc]

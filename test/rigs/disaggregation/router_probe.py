"""A real router in front of fake servers, which record the requests that come through it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from aiohttp import web

from sglang.embedded_mooncake import LOOPBACK, ManagedProcess
from sglang.srt.utils.network import get_free_port, is_healthy, wait_until

HEADERS: Final = {
    "Authorization": "Bearer k",
    "X-Api-Key": "k",
    "X-Request-Id": "r",
    "X-Correlation-Id": "c",
    "X-Session-Id": "s",
    "X-SMG-Routing-Key": "s",
    "X-Custom": "x",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=b",
    "baggage": "a=b",
}
"""Headers of a client."""
_OURS: Final[dict[str, Any]] = {
    "session_id": "s", "priority": 3, "extra_key": "e", "cache_salt": "c", "user": "u", "rid": "r",
    "return_cache_report": True, "return_cached_tokens_details": True, "stop_regex": "y",
    "logit_bias": {"3": 1.0}, "no_stop_trim": True, "min_tokens": 1, "sampling_seed": 7,
}  # fmt: skip
_HELLO: Final = [{"role": "user", "content": "hi"}]
_SAMPLING: Final = ("stop_regex", "logit_bias", "no_stop_trim", "sampling_seed")
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"model": "m", "messages": _HELLO, "json_schema": "{}", **_OURS},
    "/v1/completions": {"model": "m", "prompt": "hi", "json_schema": "{}", **_OURS},
    "/generate": {
        **{name: _OURS[name] for name in _OURS if name not in _SAMPLING},
        "text": "hi",
        "sampling_params": {
            "max_new_tokens": 4,
            "structural_tag": "{}",
            "json_schema": "{}",
            **{name: _OURS[name] for name in _SAMPLING},
        },
    },
    "/v1/responses": {"model": "m", "input": "hi", "session_id": "s", "cache_salt": "c"},
    "/v1/messages": {
        "model": "m", "messages": _HELLO, "max_tokens": 4,
        **{name: _OURS[name] for name in ("session_id", "priority", "extra_key", "cache_salt")},
    },
}  # fmt: skip
"""Bodies with the fields of this engine that OpenAI and Anthropic do not have."""


@dataclass(frozen=True)
class RouterFacts:
    """The facts of docs/pd.md about a router. Paths that are not named lose nothing."""

    name: str
    command: tuple[str, ...]
    lost: Mapping[str, frozenset[str]]
    """Fields that do not arrive, by path; those of a field in it with a dot."""
    refused: Mapping[tuple[str, bool], int]
    """Statuses of refusals, by path, and whether it is in front of a pair."""
    closes_other_half: bool
    """True if it closes the connection to one server of a pair as soon as the other refuses."""
    closed_when_client_leaves: frozenset[str]
    """Servers whose connection it closes when the client of a stream of a pair leaves."""
    without_model: Mapping[str, int]
    """Statuses of bodies that name no model, by path."""
    unknown_model: Mapping[bool, int]
    """Status of an OpenAI body whose model no server has, by whether it is before a pair."""
    server_settings: str
    """Field of a server in `GET /workers` that has what the server says of itself."""


class Worker:
    """Context manager: a server that records requests and answers as it is told.

    Attributes:
        seen: Header and body of each request so far.
        left: Number of requests whose connection was closed before their answer was complete.
        num_parts: Number of parts of streams that were sent.
    """

    def __init__(self, kind: str = "null") -> None:
        self._kind = kind
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._port = get_free_port()
        self.url = f"http://{LOOPBACK}:{self._port}"
        self.seen: list[tuple[Mapping[str, str], dict[str, Any]]] = []
        self.left = self.num_parts = 0
        self.status = 200
        """Status of the next answers; others than 200 with `Retry-After: 7`."""
        self.hangs = False
        """True: the next answers never come, or never end."""

    def __enter__(self) -> Worker:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def forget(self) -> None:
        """Begin anew: answer 200 at once."""
        self.seen.clear()
        self.left, self.num_parts, self.status, self.hangs = 0, 0, 200, False

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._tell)
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, LOOPBACK, self._port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _tell(self, request: web.Request) -> web.Response:
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "sglang"}
        info = {"model_path": "m", "served_model_name": "m", "is_generation": True}
        return web.json_response(
            {**info, "disaggregation_mode": self._kind, "object": "list", "data": [model]}
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.headers, body))
        if self.status != 200:
            error = {"message": "full", "type": "x", "code": self.status}
            headers = {"Retry-After": "7"}
            return web.json_response({"error": error}, status=self.status, headers=headers)
        try:
            if body.get("stream"):
                return await self._stream(request)
            while self.hangs:
                await asyncio.sleep(0.02)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finish = {"type": "length", "length": 1}
        meta = {"id": "x", "prompt_tokens": 1, "completion_tokens": 1, "finish_reason": finish}
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "text": "a", "message": message, "finish_reason": "stop"}
        whole = {"id": "x", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**whole, "text": "a", "output_ids": [1], "meta_info": meta})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b'data: {"text": "a", "output_ids": [1], "meta_info": {}}\n\n')
            self.num_parts += 1
            if not self.hangs:
                return response
            await asyncio.sleep(0.02)


@dataclass
class Probe:
    """A router, and the workers behind it: a prefill and a decode server, or one for both."""

    url: str
    workers: Sequence[Worker]
    is_pair: bool
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send the body of `BODIES` with `fields`, to workers as they are told."""
        return self.client.post(self.url + path, json={**BODIES[path], **fields}, headers=HEADERS)

    def forget(self) -> None:
        for worker in self.workers:
            worker.forget()


def lost_fields(sent: Mapping[str, Any], came: Mapping[str, Any], inside: str = "") -> set[str]:
    """Fields of `sent` that `came` lacks."""
    lost = {inside + name for name in sent if name not in came}
    for name, value in sent.items():
        if isinstance(value, dict) and isinstance(came.get(name), dict):
            lost |= lost_fields(value, came[name], f"{inside}{name}.")
    return lost


@contextmanager
def running_router(facts: RouterFacts, folder: Path, *, is_pair: bool) -> Iterator[Probe]:
    """The router in front of a pair, or of one server. It repeats requests as by default, and
    ignores earlier failures of servers."""
    with ExitStack() as stack:
        kinds = ("prefill", "decode") if is_pair else ("null",)
        workers = [stack.enter_context(Worker(kind)) for kind in kinds]
        if is_pair:
            prefill, decode = workers
            behind = ["--pd-disaggregation", "--prefill", prefill.url, "8998"]
            behind += ["--decode", decode.url]
        else:
            behind = ["--worker-urls", workers[0].url]
        port = get_free_port()
        url = f"http://{LOOPBACK}:{port}"
        process = ManagedProcess(
            facts.name,
            [
                *facts.command, *behind, "--host", LOOPBACK, "--port", str(port),
                *("--prometheus-host", LOOPBACK, "--prometheus-port", str(get_free_port())),
                *("--log-level", "warn", "--disable-circuit-breaker"),
            ],
            ready=lambda: is_healthy(url, path="/readiness"),
            log_dir=folder,
        )  # fmt: skip
        stack.callback(process.kill)
        process.start(60)
        probe = Probe(url, workers, is_pair)
        stack.callback(probe.client.close)
        yield probe


def leave_stream(probe: Probe, path: str) -> None:
    """Begin a stream that never ends, and leave it once both servers stream. `sglang_router` sends
    nothing before prefill's stream has ended."""
    body = {**BODIES[path], "stream": True}
    connection = http.client.HTTPConnection(probe.url.removeprefix("http://"), timeout=30)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert wait_until(lambda: all(worker.num_parts > 1 for worker in probe.workers), 20)
    connection.close()

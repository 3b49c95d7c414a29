"""A fake server that streams events as the real server does, at once or at a given rate."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from sglang.srt.utils.network import get_free_port


@dataclass(frozen=True)
class _Stream:
    body: dict[str, Any]
    say: Callable[[dict[str, Any]], Awaitable[None]]
    response: web.StreamResponse


class FakeServer:
    """Context manager that answers at `url` in a thread of its own.

    Args:
        step_s: Seconds between two tokens.
        fail_every: Every n-th request (from 1) fails in mid-stream; 0: none.
        info: The answer of `/model_info`.
    """

    def __init__(
        self, *, step_s: float = 0.0, fail_every: int = 0, info: dict[str, Any] | None = None
    ) -> None:
        self._step_s = step_s
        self._fail_every = fail_every
        self._info = info or {}
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._port = get_free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the generation requests, in order of arrival."""
        self.flushes = 0
        self.running = 0
        self.most_running = 0

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(30), "the fake server did not start"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self._port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._info)

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        return web.json_response({"success": True})

    @contextlib.asynccontextmanager
    async def _stream(self, request: web.Request) -> AsyncIterator[_Stream]:
        body = msgspec.json.decode(await request.read())
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(event: dict[str, Any]) -> None:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

        try:
            yield _Stream(body, say, response)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1

    def _fails(self) -> bool:
        return bool(self._fail_every) and len(self.bodies) % self._fail_every == 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        async with self._stream(request) as stream:
            wanted = stream.body["sampling_params"]["max_new_tokens"]
            fails = self._fails()
            prompt = len(stream.body["input_ids"])
            meta: dict[str, Any] = {
                "id": "x",
                "prompt_tokens": prompt,
                "cached_tokens": 12,
                "cached_tokens_details": {
                    "device": 8,
                    "host": 3,
                    "storage": 1,
                    "storage_backend": "HiCacheFile",
                },
            }
            for count in range(1, wanted + 1):
                await asyncio.sleep(self._step_s)
                if fails and count == 2:
                    abort = {"type": "abort", "message": "out of luck"}
                    meta = {**meta, "completion_tokens": 1, "finish_reason": abort}
                    await stream.say({"text": "a", "meta_info": meta})
                    break
                finish = {"type": "length"} if count == wanted else None
                meta = {**meta, "completion_tokens": count, "finish_reason": finish}
                ids = list(range(count))
                await stream.say({"text": "a" * count, "output_ids": ids, "meta_info": meta})
        return stream.response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, lambda piece: {"index": 0, "text": piece})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, lambda piece: {"index": 0, "delta": {"content": piece}})

    async def _openai(self, request: web.Request, choice: Any) -> web.StreamResponse:
        async with self._stream(request) as stream:
            await stream.say({"choices": [choice("")]})  # the role, without a token
            if self._fails():
                await stream.say({"error": {"message": "out of luck", "code": 500}})
                return stream.response
            for _ in range(stream.body["max_tokens"]):
                await asyncio.sleep(self._step_s)
                await stream.say({"choices": [choice("a")]})
            usage = {
                "prompt_tokens": 20,
                "completion_tokens": stream.body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 12},
            }
            tiers = {"device": 8, "host": 3, "storage": 1}
            await stream.say(
                {"choices": [], "usage": usage, "sglext": {"cached_tokens_details": tiers}}
            )
        return stream.response

"""Several streams at once: order, failures, and what stays behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints.http.request import Request
from sglang.srt.entrypoints.http.sse import merge
from sglang.srt.managers.tokenizer.request_state import TOKEN_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Stream:
    """Gives its items, then fails if told so; knows whether it was closed."""

    def __init__(self, *items: str, error: Exception | None = None) -> None:
        self._items = items
        self._error = error
        self.is_closed = False

    async def run(self) -> AsyncGenerator[str, None]:
        try:
            for item in self._items:
                yield item
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


def collect(*streams: Stream) -> list[tuple[int, str]]:
    async def run() -> list[tuple[int, str]]:
        return [pair async for pair in merge([stream.run() for stream in streams])]

    return asyncio.run(run())


@pytest.mark.parametrize("others", [(), (Stream(), Stream())])
def test_the_items_of_one_stream_stay_in_order(others: tuple[Stream, ...]) -> None:
    assert collect(Stream("a", "b", "c"), *others) == [(0, "a"), (0, "b"), (0, "c")]


def test_items_of_several_streams_carry_their_index() -> None:
    assert sorted(collect(Stream("a", "b"), Stream("c"))) == [(0, "a"), (0, "b"), (1, "c")]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_is_raised_once_and_closes_all(count: int) -> None:
    streams = [Stream(error=ValueError(f"stream {index}")) for index in range(count)]
    complaints: list[Any] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        with pytest.raises(ValueError, match="stream 0"):
            async for _ in merge([stream.run() for stream in streams]):
                pass
        gc.collect()

    asyncio.run(run())
    gc.collect()
    assert complaints == [], "the errors of the other streams are dropped without a word"
    assert all(stream.is_closed for stream in streams)


@pytest.mark.parametrize("count", [1, 2])
def test_leaving_early_closes_all(count: int) -> None:
    streams = [Stream("a", "b") for _ in range(count)]

    async def run() -> None:
        merged = merge([stream.run() for stream in streams])
        await anext(merged)
        await merged.aclose()

    asyncio.run(run())
    assert all(stream.is_closed for stream in streams)


HELLO: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello"},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}


@pytest.mark.parametrize("path", HELLO)
def test_a_stream_tells_the_memory_that_its_output_takes(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What slow readers are ended by; see `ServerState.end_slow_readers`."""
    seen: list[Request] = []
    make = Request.__init__

    def note(self: Request, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(Request, "__init__", note)
    answer = client.post(path, json={"model": "echo", "stream": True, **HELLO[path]})
    assert answer.status_code == 200, answer.text
    (request,) = seen
    assert len(request.held) == 1 and request.held[0].num_bytes >= TOKEN_BYTES

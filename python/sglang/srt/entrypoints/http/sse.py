"""JSON answers, concurrent streams, server-sent events, and work that ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec

from sglang.srt.entrypoints.http.errors import ApiError, as_api_error, error_body
from sglang.srt.entrypoints.http.request import Request, Response

T = TypeVar("T")

SLICE: Final = 1 << 11
"""Number of logprobs that are formatted in one turn of the event loop. They take a millisecond, or
twenty if each token's text has to be decoded."""


class Slices:
    """Yields control to the event loop after every `SLICE` entries."""

    def __init__(self) -> None:
        self._done = 0

    async def count(self, entries: int) -> None:
        self._done += entries
        if self._done >= SLICE:
            self._done = 0
            await asyncio.sleep(0)


async def gather_or_cancel(work: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all results, in order; the first exception cancels the rest and is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they come, each with its stream's index, until all have
    ended."""
    if len(streams) == 1:
        # Several streams need a task for each item; a single one does not.
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    pending: dict[asyncio.Future[T], int] = {
        asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)
    }
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=pending.__getitem__):
                index = pending.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, item
    finally:
        for future in pending:
            future.cancel()
        if pending:
            await asyncio.wait(pending)
        for stream in streams:
            await stream.aclose()


DONE: Final = b"data: [DONE]\n\n"
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_encoder: Final = msgspec.json.Encoder()


def json_bytes(value: object) -> bytes:
    return _encoder.encode(value)


def json_response(value: object) -> Response:
    return Response(json_bytes(value), media_type="application/json")


class ClientLeft(ApiError):
    """The client hung up before its answer was complete."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left")


class EventStream(Response):
    """Sends each object of `events` as one event, then `[DONE]`; or, if `named`, each with its
    `type` as the event's name, and nothing at the end.

    When the client leaves, the generator is closed, even while it waits for its next item. An error
    after the first event becomes an event of its own.
    """

    def __init__(
        self, first: object, events: AsyncGenerator[object, None], *, named: bool = False
    ) -> None:
        """Take a stream whose `first` event has come, with `unless_client_leaves(request.gone,
        anext(events), events)`: a failure before it is then a plain HTTP error."""
        super().__init__(headers=_STREAM_HEADERS)
        self._first = first
        self._events = events
        self._named = named

    async def send(self, request: Request) -> None:
        """Answer `request`."""
        try:
            # The first token goes out before anything is set up for the others.
            request.begin(200, self.headers)
            request.write(self._shown(self._first))
            with contextlib.suppress(ClientLeft):
                await unless_client_leaves(request.gone, self._pump(request))
        finally:
            await self._events.aclose()

    async def _pump(self, request: Request) -> None:
        async for event in self._with_errors():
            await request.drain()
            request.write(self._shown(event))
        if not self._named:
            request.write(DONE)
        request.end()

    async def _with_errors(self) -> AsyncIterator[object]:
        try:
            async for event in self._events:
                yield event
        except Exception as error:
            api_error = as_api_error(error)
            if api_error is None:
                raise
            yield error_body(api_error)

    def _shown(self, event: Any) -> bytes:
        name = f"event: {event['type']}\n".encode() if self._named else b""
        return b"%bdata: %b\n\n" % (name, json_bytes(event))


async def unless_client_leaves(
    gone: asyncio.Future[None],
    work: Coroutine[Any, Any, T],
    events: AsyncGenerator[object, None] | None = None,
) -> T:
    """The result of `work`, which runs in the caller's task and is cancelled when the client
    leaves: when `gone`, the request's, is done. Then `events`, the stream whose first event it
    waits for, is closed.

    Raises:
        ClientLeft: No answer reaches the client any more.
    """
    task = asyncio.current_task()
    assert task is not None, "endpoints run in tasks"
    has_left = is_over = False

    def cancel() -> None:
        nonlocal has_left
        if not is_over:
            has_left = True
            task.cancel()

    def on_gone(_: asyncio.Future[None]) -> None:
        # The client may leave in the turn of the loop in which `work` ends: then the answer counts.
        task.get_loop().call_soon(cancel)

    gone.add_done_callback(on_gone)
    try:
        return await work
    except asyncio.CancelledError:
        if events is not None:
            await events.aclose()
        if not has_left:
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        is_over = True
        gone.remove_done_callback(on_gone)

"""Concurrent coroutines and streams: gathering results, merging items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 1 << 11
"""Number of logprobs that are formatted in one turn of the event loop. They take a millisecond, or
twenty if each token's text has to be decoded."""


class Slices:
    """Yields control to the event loop after every `SLICE` entries."""

    def __init__(self) -> None:
        self._done = 0

    async def count(self, entries: int) -> None:
        """Count finished entries; yield if a slice is full."""
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

"""One answer shared by all callers that ask at the same time, or soon after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Runs one piece of work at a time. Event loop thread only."""

    def __init__(self, fresh_seconds: float) -> None:
        """Reuse an answer for `fresh_seconds` seconds."""
        self._fresh_seconds = fresh_seconds
        self._work: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def latest(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The last answer if it is fresh, else the answer in progress, else the answer of a new
        `ask`. Raises as `ask` does.

        The work goes on if the caller that began it is cancelled, since others may wait for it.
        """
        now = asyncio.get_running_loop().time
        if self._work is None or (self._work.done() and now() - self._ended >= self._fresh_seconds):
            self._work = asyncio.create_task(self._run(ask))
        return await asyncio.shield(self._work)

    async def _run(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await ask()
        finally:
            self._ended = asyncio.get_running_loop().time()

"""One answer for all who ask at once, or soon after: for work that anybody may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Runs one piece of work at a time. Event loop thread only."""

    def __init__(self, fresh_seconds: float) -> None:
        """Keep an answer for `fresh_seconds` from when it came."""
        self._fresh_seconds = fresh_seconds
        self._work: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def latest(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer that is fresh or under way, or else what `ask` says; it goes on when who
        asked first leaves. Raises as `ask` does."""
        now = asyncio.get_running_loop().time
        if self._work is None or (self._work.done() and now() - self._ended >= self._fresh_seconds):
            self._work = asyncio.create_task(self._run(ask))
        return await asyncio.shield(self._work)

    async def _run(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await ask()
        finally:
            self._ended = asyncio.get_running_loop().time()

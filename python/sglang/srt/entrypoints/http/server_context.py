"""State that the endpoints of one server share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from sglang.srt.configs.generation_config import SamplingDefaults
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.http.request import Request
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.process import HeapTrimmer
from sglang.srt.utils.threads import started_pool

if TYPE_CHECKING:
    from sglang.srt.entrypoints.http.pd_role import PDRole
    from sglang.srt.managers.tokenizer.chat_template import ChatTemplate


T = TypeVar("T")
Ask: TypeAlias = Callable[[], Coroutine[Any, Any, T]]


class SharedAnswer(Generic[T]):
    """One answer for all who ask at the same time, or soon after. Event loop thread only."""

    def __init__(self, fresh_seconds: float) -> None:
        self._fresh_seconds = fresh_seconds
        self._work: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def latest(self, ask: Ask[T]) -> T:
        """The last answer if it is fresh, else the answer in progress, else the answer of a new
        `ask`. Raises as `ask` does.

        The work goes on if the caller that began it is cancelled, since others may wait for it.
        """
        now = asyncio.get_running_loop().time
        if self._work is None or (self._work.done() and now() - self._ended >= self._fresh_seconds):
            self._work = asyncio.create_task(self._run(ask))
        return await asyncio.shield(self._work)

    async def _run(self, ask: Ask[T]) -> T:
        try:
            return await ask()
        finally:
            self._ended = asyncio.get_running_loop().time()


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """One server: its arguments, the `TokenizerManager`, and the engine's ready message."""

    args: ServerArgs
    manager: TokenizerManager
    chat_template: ChatTemplate
    ready_details: dict[str, Any]
    model_info: dict[str, Any] = field(default_factory=dict)
    pd_role: PDRole | None = None
    """Changes the role of a prefill or decode server; None: there is no engine behind the
    application."""
    sampling_defaults: SamplingDefaults = field(
        default_factory=lambda: SamplingDefaults(values={}, source="no model")
    )
    started: float = field(default_factory=time.time)  # noqa: TID251 (a date, for clients)
    memory: HeapTrimmer = field(default_factory=HeapTrimmer)
    probe: SharedAnswer[ApiError | None] = field(default_factory=lambda: SharedAnswer(1.0))
    """Result of the last health probe: the reason why no token could be generated, or None."""
    probed_at: float = -math.inf
    """`time.monotonic()` seconds of the last health probe, for a server that ends."""
    cache_views: SharedAnswer[list[dict[str, Any]]] = field(
        default_factory=lambda: SharedAnswer(1.0)
    )
    """The last answers about what is in the cache of each DP group."""
    renderer: ThreadPoolExecutor = field(default_factory=lambda: started_pool(1, "render"))
    """The thread `render`, for chat templates over long conversations."""

    @property
    def model_name(self) -> str:
        name = self.args.served_model_name or self.args.model_path
        assert name is not None, "resolved arguments name the model"
        return name


def context_of(request: Request) -> ServerContext:
    context = request.app.context
    assert isinstance(context, ServerContext)
    return context

"""Control requests to the scheduler and their answers, matched by id. Event loop thread only."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Final, TypeAlias

from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.managers.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetHiCacheStorageReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    GetWeightSeedReq,
    Message,
)
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable

QUICK_TIMEOUT: Final = 10.0
"""Seconds for control requests that the scheduler answers between two forwards."""
STORAGE_TIMEOUT: Final = LONGEST_STORAGE_CHANGE_S + 20.0
"""Seconds for changes of L3: connecting and registering memory takes a while."""

_Build: TypeAlias = Callable[[str], Message]


class ControlClient:
    """Sends control requests through `send` and waits for their answers."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReqOutput]] = {}

    def deliver(self, answer: ControlReqOutput) -> None:
        """Hand an answer to the caller that waits for it; a late answer is dropped."""
        future = self._waiting.get(answer.req_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail_all(self, error: Exception) -> None:
        """End all pending control requests with `error`: no answer will come any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def flush_cache(self, timeout: float) -> ControlReqOutput:
        """Empty L1 and L2, after waiting at most `timeout` seconds for the scheduler to be idle."""
        return await self._ask(
            lambda req_id: FlushCacheReqInput(req_id=req_id, timeout=timeout),
            timeout + QUICK_TIMEOUT,
        )

    async def internal_state(self, timeout: float = QUICK_TIMEOUT) -> ControlReqOutput:
        """A snapshot of the scheduler's state."""
        return await self._ask(lambda req_id: GetInternalStateReq(req_id=req_id), timeout)

    async def metrics(self, timeout: float = QUICK_TIMEOUT) -> ControlReqOutput:
        """The scheduler's metrics; `data["text"]` is in Prometheus' format."""
        return await self._ask(lambda req_id: GetMetricsReq(req_id=req_id), timeout)

    async def weight_seed(self, rank: int) -> ControlReqOutput:
        """Addresses of a rank's weights, for a server that reads them."""
        return await self._ask(
            lambda req_id: GetWeightSeedReq(req_id=req_id, rank=rank), QUICK_TIMEOUT
        )

    async def get_storage(self) -> ControlReqOutput:
        """The name of the attached L3 backend, and the policies."""
        return await self._ask(
            lambda req_id: GetHiCacheStorageReqInput(req_id=req_id), QUICK_TIMEOUT
        )

    async def attach_storage(
        self,
        backend: str,
        extra_config_json: str | None = None,
        prefetch_policy: str | None = None,
        write_policy: str | None = None,
    ) -> ControlReqOutput:
        """Attach an L3 backend, or update the policies of the attached one."""
        return await self._ask(
            lambda req_id: AttachHiCacheStorageReqInput(
                req_id=req_id,
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config_json=extra_config_json,
                hicache_storage_prefetch_policy=prefetch_policy,
                hicache_write_policy=write_policy,
            ),
            STORAGE_TIMEOUT,
        )

    async def detach_storage(self) -> ControlReqOutput:
        """Detach the L3 backend; its data stays."""
        return await self._ask(
            lambda req_id: DetachHiCacheStorageReqInput(req_id=req_id), STORAGE_TIMEOUT
        )

    async def clear_storage(self) -> ControlReqOutput:
        """Remove this namespace's objects from L3."""
        return await self._ask(lambda req_id: ClearHiCacheReqInput(req_id=req_id), STORAGE_TIMEOUT)

    async def _ask(self, build: _Build, timeout: float) -> ControlReqOutput:
        """Send the message that `build` makes for a fresh id, and wait for the answer.

        Raises:
            EngineUnavailable: No answer within `timeout` seconds, or the engine died.
        """
        req_id = uuid.uuid4().hex
        message = build(req_id)
        future: asyncio.Future[ControlReqOutput] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        try:
            self._send(message)
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineUnavailable(
                f"the scheduler did not answer {type(message).__name__} within {timeout:g} s: "
                "it is busy or stuck, see its log; try again"
            ) from None
        finally:
            del self._waiting[req_id]

"""The engine without HTTP: `sglang.Engine(**server_args).generate(...)`."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, TypeVar

from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.entrypoints.engine_front import EngineFront
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.native_protocol import GenerateBody, to_requests
from sglang.srt.entrypoints.native_routes import stream_answers, whole_answers
from sglang.srt.managers.messages.io_struct import FlushCacheReqInput, GetInternalStateReq
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable, GenerateRequest
from sglang.srt.managers.tokenizer.server_channel import QUICK_TIMEOUT
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging_utils import configure_logger

T = TypeVar("T")

_SHUTDOWN_SECONDS: Final = 30.0
_START_SECONDS: Final = 10.0


class Engine:
    """An engine with child processes of its own; any thread may call `generate`.

    Its event loop runs in the thread `engine-loop`. `with Engine(...) as engine:` shuts it down.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        """Start the engine, which takes as long as loading the model.

        Args:
            server_args: All settings; None: they are given as keywords (`model_path=...`).

        Raises:
            ValueError: A setting is unknown or wrong, the model's files are missing or broken, or
                the store of L3 does not answer.
            StartError: A process could not start.
        """
        if server_args is not None and kwargs:
            raise ValueError("give server_args or keywords, not both")
        if server_args is None:
            server_args = ServerArgs.from_kwargs(**{"log_level": "error", **kwargs})
        if server_args.remote_instance_weight_loader_start_seed_via_transfer_engine:
            raise ValueError(
                f"{START_SEED} has no effect here: other servers ask over HTTP for the addresses "
                "of weights; start a server"
            )
        configure_logger(server_args.log_level)
        self.server_args = server_args.resolve()
        self._front = EngineFront(self.server_args)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-loop", daemon=True
        )
        self._thread.start()
        self._closed = False
        self._submit(self._front.manager.start(), _START_SECONDS)
        self._front.processes.watch(self._front.manager.fail_all_threadsafe)
        atexit.register(self.shutdown)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[Any] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Complete prompts, like `POST /generate`.

        Args:
            prompt: One text or several; None: give `input_ids`.
            sampling_params: Parameters for all prompts, or a list with one for each.
            input_ids: Token ids of one prompt, or of several.
            stream: Return an iterator of cumulative answers.
            fields: Other fields of the endpoint (`return_logprob`, `rid`, `extra_key`, ...).

        Returns:
            An answer, a list of them for a batch, or their iterator.

        Raises:
            ValueError: A field is wrong; names it.
            EngineUnavailable: The engine has died or was shut down.
            RequestFailed: The engine refused the request or failed on it.
        """
        requests, is_batch = _requests(prompt, sampling_params, input_ids, stream, fields)
        with_text = bool(fields.get("return_text_in_logprobs"))
        if stream:
            return self._iterate(requests, is_batch, with_text)
        answers = self._submit(whole_answers(self._front.manager, requests, with_text))
        return answers if is_batch else answers[0]

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[Any] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Like `generate`, for callers with an event loop of their own; streams are async
        iterators."""
        requests, is_batch = _requests(prompt, sampling_params, input_ids, stream, fields)
        with_text = bool(fields.get("return_text_in_logprobs"))
        if stream:
            return self._iterate_async(requests, is_batch, with_text)
        work = whole_answers(self._front.manager, requests, with_text)
        answers = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        return answers if is_batch else answers[0]

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty L1 and L2, after waiting at most `timeout` seconds for the engine to be idle;
        return whether it was done."""
        message = FlushCacheReqInput(timeout=timeout)
        asking = self._front.manager.control.ask(message, timeout + QUICK_TIMEOUT)
        return self._submit(asking).success

    def get_server_info(self) -> dict[str, Any]:
        """Settings without secrets, and the engine's present state."""
        state = self._submit(self._front.manager.control.ask(GetInternalStateReq())).data
        details = self._front.context.ready_details
        return {
            **self.server_args.to_public_dict(),
            **details,
            "transfer_engine": state["transfer_engine"],
            "internal_states": [state],
        }

    def shutdown(self) -> None:
        """End the engine's processes in order. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        drained = asyncio.run_coroutine_threadsafe(self._front.drain(_SHUTDOWN_SECONDS), self._loop)
        try:
            drained.result()
        finally:
            self._front.processes.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        if self._closed:
            work.close()
            raise EngineUnavailable("the engine has been shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _iterate(
        self, requests: list[GenerateRequest], is_batch: bool, with_text: bool
    ) -> Iterator[dict[str, Any]]:
        answers = stream_answers(self._front.manager, requests, is_batch, with_text)
        try:
            while (answer := self._submit(_next(answers))) is not None:
                yield answer
        finally:
            if not self._closed:
                self._submit(answers.aclose())

    async def _iterate_async(
        self, requests: list[GenerateRequest], is_batch: bool, with_text: bool
    ) -> AsyncIterator[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        home = asyncio.get_running_loop()

        async def pump() -> None:
            answers = stream_answers(self._front.manager, requests, is_batch, with_text)
            end: BaseException | None = None
            try:
                async with aclosing(answers):
                    async for answer in answers:
                        home.call_soon_threadsafe(queue.put_nowait, _snapshot(answer))
            except Exception as error:  # noqa: BLE001 - raised again where the caller waits
                end = error
            home.call_soon_threadsafe(queue.put_nowait, end)

        running = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while isinstance(item := await queue.get(), dict):
                yield item
            if item is not None:
                raise item
        finally:
            running.cancel()


def _requests(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    input_ids: list[Any] | None,
    stream: bool,
    fields: dict[str, Any],
) -> tuple[list[GenerateRequest], bool]:
    unknown = fields.keys() - set(GenerateBody.__struct_fields__)
    if unknown:
        raise ValueError(f"generate() has no field {sorted(unknown)[0]!r}")
    body = GenerateBody(
        text=prompt, sampling_params=sampling_params, input_ids=input_ids, stream=stream, **fields
    )
    try:
        return to_requests(body)
    except ApiError as error:
        raise ValueError(error.message) from None


async def _next(answers: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    async for answer in answers:
        return _snapshot(answer)
    return None


def _snapshot(answer: dict[str, Any]) -> dict[str, Any]:
    """A copy for another thread, since the lists inside grow with the next step."""
    meta = {k: list(v) if isinstance(v, list) else v for k, v in answer["meta_info"].items()}
    return {**answer, "output_ids": list(answer["output_ids"]), "meta_info": meta}

"""The server process's side of the engine: requests in, growing outputs out.

Owns two sockets (to the scheduler, from scheduler and detokenizer) and one task that reads the
second. Everything runs on the event loop that called `start`; only `PromptEncoder` has a thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    BatchStrOutput,
    ControlReqOutput,
    Message,
    RequestOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    encode,
    frame_of,
    server_decoder,
)
from sglang.srt.managers.tokenizer.control_client import ControlClient
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    PromptIds,
)
from sglang.srt.managers.tokenizer.prompt_encoder import PromptEncoder
from sglang.srt.managers.tokenizer.request_limits import (
    RequestLimits,
    check_fields,
    check_logprob_start,
    check_prompt,
    check_sampling,
    check_text,
    fit_max_new_tokens,
)
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.observability.server_metrics import ServerMetrics
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages
from sglang.srt.utils.cache_key import combine_extra_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.managers.messages.ipc import IpcAddresses

logger = logging.getLogger(__name__)

_SEED_BITS: Final = 63


class TokenizerManager:
    """Checks, tokenizes and sends requests; hands out their outputs as they grow."""

    def __init__(
        self,
        *,
        ipc: IpcAddresses,
        tokenizer: PreTrainedTokenizerBase,
        limits: RequestLimits,
        metrics: ServerMetrics | None = None,
        log_requests: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics
        self.control = ControlClient(self._send)
        self._ipc = ipc
        self._log_requests = log_requests
        self._encoder = PromptEncoder(tokenizer)
        self._states: dict[str, RequestState] = {}
        self._encodings: dict[str, asyncio.Future[list[int]]] = {}
        """By id, of the requests whose long prompt is being tokenized."""
        self._leaving: set[str] = set()
        """Ids whose client has left and whose last output has not come yet: still taken."""
        self._decoder = server_decoder()
        self._bad = BadMessages(logger, "message")
        self._context: zmq.asyncio.Context | None = None
        self._sink: zmq.Socket[bytes] | None = None
        self._outbox: list[bytes] = []
        """Encoded messages for the scheduler, until `_flush`."""
        self._reader: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the sockets on the running loop and begin to read."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        source = self._context.socket(zmq.PULL)
        source.set_hwm(0)
        source.bind(self._ipc.server_input)
        # A plain socket: without a high-water mark a send never waits, so there is no future in it.
        self._sink = zmq.Socket(self._context, zmq.PUSH)
        self._sink.set_hwm(0)
        self._sink.connect(self._ipc.scheduler_input)
        self._reader = asyncio.create_task(self._read(source), name="tokenizer-manager-reader")

    async def close(self) -> None:
        """Fail what is pending and close the sockets. Idempotent."""
        self.fail_all("the engine has been shut down")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        self._encoder.close()
        self._flush()
        if self._context is not None:
            # A little time for the last message; the peer may be gone already.
            if self._sink is not None:
                self._sink.close(linger=200)
            self._context.destroy(linger=200)
            self._context = None
            self._sink = None

    def refuse_new(self, reason: str) -> None:
        """Take no further requests; `reason` is what their clients are told."""
        self._refusal = reason

    def fail_all(self, reason: str) -> None:
        """The engine has died or ends: end every request and question with `reason`."""
        self._refusal = self._refusal or reason
        error = EngineUnavailable(reason)
        for state in self._states.values():
            state.fail(error)
        self.control.fail_all(error)

    def fail_all_threadsafe(self, reason: str) -> None:
        """`fail_all` from another thread; nothing where the loop has ended."""
        self._refusal = self._refusal or reason
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail_all, reason)

    async def shut_down_scheduler(self, timeout: float) -> None:
        """Ask the scheduler to finish within `timeout` seconds and to exit."""
        self._send(ShutdownReq(timeout=timeout))

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    @property
    def refusal(self) -> str | None:
        """Why no request is taken, or None."""
        return self._refusal

    # ---- requests --------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestState, None]:
        """Run one request; yields its state whenever it grew, the last time when it has ended.

        Several messages between two looks of the reader are one step. Leaving the iterator
        early aborts the request.

        Raises:
            InvalidRequest: Before anything was sent; names the field.
            EngineUnavailable: The engine shuts down or has died.
            RequestFailed: The scheduler refused the request or failed on it.
        """
        state = await self._begin(request)
        try:
            has_ended = False
            while not has_ended:
                has_ended = await state.grown()
                yield state
        finally:
            self._leave(state)

    async def generate_whole(self, request: GenerateRequest) -> RequestState:
        """Run one request to its end; raises as `generate` does."""
        state = await self._begin(request)
        try:
            while not await state.grown():
                pass
            return state
        finally:
            self._leave(state)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        return await self._encoder.encode(text, add_special_tokens=add_special_tokens)

    async def abort(self, rid: str) -> None:
        """End the request `rid`, all its samples; readers see the finish reason `abort`."""
        meant = [state for state in self._states.values() if rid in (state.rid, state.sample_of)]
        self._abort_unsent(meant)
        # The id alone as well: of a request whose client has left.
        for one in {rid, *(state.rid for state in meant if state.is_sent)}:
            self._send(AbortReq(rid=one))

    async def abort_all(self) -> None:
        """End every request."""
        self._abort_unsent(list(self._states.values()))
        self._send(AbortReq(abort_all=True))

    def _abort_unsent(self, states: Iterable[RequestState]) -> None:
        """End those whose prompt is still tokenized: the scheduler will never hear of them."""
        for state in states:
            if not state.is_sent:
                state.abort_unsent()
                if (encoding := self._encodings.get(state.rid)) is not None:
                    encoding.cancel()

    async def _begin(self, request: GenerateRequest) -> RequestState:
        if self._refusal is not None:
            raise EngineUnavailable(self._refusal)
        now = time.monotonic()
        check_fields(request)
        self._check_rid(request.rid)
        check_sampling(request, self.limits, self.tokenizer)
        # From here on its id is taken and it can be aborted, however long tokenizing takes.
        state = RequestState.start(request, now)
        self._states[request.rid] = state
        try:
            given = await self._prompt_ids(request, state)
            if not state.ended:
                self._submit(request, state, given)
        except BaseException:
            del self._states[request.rid]
            raise
        return state

    def _submit(self, request: GenerateRequest, state: RequestState, given: PromptIds) -> None:
        """Check what the tokens decide, and send the request to the scheduler."""
        input_ids = check_prompt(given, self.limits, request.prompt_field)
        check_logprob_start(request, len(input_ids))
        fit_max_new_tokens(request, len(input_ids), self.limits)
        self._send(_to_message(request, input_ids, state.created_time))
        state.note_sent(input_ids, request.logprob_start_len)

    def _check_rid(self, rid: str) -> None:
        if rid in self._states or rid in self._leaving:
            raise InvalidRequest(
                f"rid {rid!r} is in use by a running request: choose another", field="rid"
            )

    async def _prompt_ids(self, request: GenerateRequest, state: RequestState) -> PromptIds:
        """The prompt's tokens; none where the request was ended meanwhile."""
        if request.input_ids is not None:
            return request.input_ids
        if not request.text:
            raise InvalidRequest(
                f"{request.prompt_field} is empty: give at least one character",
                field=request.prompt_field,
            )
        check_text(request.text, self.limits, request.prompt_field)
        adds = request.add_special_tokens
        ids = self._encoder.encode_short(request.text, add_special_tokens=adds)
        if ids is not None:
            return ids
        # A task of its own, so that an abort can end it.
        encoding = asyncio.ensure_future(
            self._encoder.encode(request.text, add_special_tokens=adds)
        )
        self._encodings[request.rid] = encoding
        try:
            return await encoding
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not state.ended or (task is not None and task.cancelling()):
                raise
            return []
        finally:
            del self._encodings[request.rid]

    def _leave(self, state: RequestState) -> None:
        """Book a request that nobody reads any more; one that still runs is aborted."""
        self._states.pop(state.rid, None)
        if not state.ended:
            self._leaving.add(state.rid)
            if self._sink is not None:
                self._send(AbortReq(rid=state.rid))
        probe = state.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        if self.metrics is not None and not probe:
            self.metrics.observe_end(state)
        if self._log_requests and not probe:
            reason = state.finish_reason.type if state.finish_reason else "left by its client"
            logger.info(
                "request %s: %d prompt tokens (%d cached), %d output tokens, %.3f s, %s",
                state.rid,
                state.prompt_tokens,
                state.cached_tokens_details.total,
                len(state.output_ids),
                time.monotonic() - state.created_time,
                reason,
            )

    # ---- sockets ---------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        """Let `message` leave at the end of this turn of the event loop, with the others of it: one
        wake-up of the scheduler, and one prefill batch for requests that came together."""
        if self._loop is None or self._sink is None:
            raise EngineUnavailable("the engine has been shut down")
        encoded = encode(message)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encoded)

    def _flush(self) -> None:
        """Send what has collected. The socket never blocks."""
        if self._outbox and self._sink is not None:
            self._sink.send(frame_of(self._outbox), zmq.NOBLOCK)
        self._outbox.clear()

    async def _read(self, source: zmq.asyncio.Socket) -> None:
        try:
            while True:
                payload = await source.recv()
                try:
                    message = self._decoder.decode(payload)
                except MALFORMED as error:
                    self._bad.add(error)
                    continue
                self._handle(message)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.critical("the reader of engine messages failed", exc_info=True)
            self.fail_all("the server failed to read the engine's messages; see its log")
            raise

    def _handle(self, message: BatchStrOutput | ControlReqOutput) -> None:
        if isinstance(message, ControlReqOutput):
            self.control.deliver(message)
            return
        now = time.monotonic()
        for update in message.outputs:
            state = self._states.get(update.output.rid)
            # Outputs of a request whose client has left are still on their way for a while.
            if state is None or state.ended:
                if update.output.finish_reason is not None:
                    self._leaving.discard(update.output.rid)
                continue
            fresh = state.apply(update, self._stop_text(state, update.output))
            if fresh:
                self._observe_tokens(state, fresh, now)

    def _stop_text(self, state: RequestState, output: RequestOutput) -> str:
        """Text of the stop token that the detokenizer left out, where it is to be shown."""
        reason = output.finish_reason
        if not state.no_stop_trim or reason is None or not isinstance(reason.matched, int):
            return ""
        text = self.tokenizer.decode(
            [reason.matched], skip_special_tokens=output.skip_special_tokens
        )
        return text if isinstance(text, str) else ""

    def _observe_tokens(self, state: RequestState, fresh: int, now: float) -> None:
        last = state.last_token_time
        if last is None:
            state.first_token_time = now
        state.last_token_time = now
        if self.metrics is None or not state.stream:
            return
        if state.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        if last is None:
            self.metrics.observe_first_token(now - state.created_time)
        else:
            self.metrics.observe_next_tokens(now - last, fresh)


def _to_message(
    request: GenerateRequest, input_ids: TokenArray, now: float
) -> TokenizedGenerateReqInput:
    seed = request.sampling_params.sampling_seed
    return TokenizedGenerateReqInput(
        rid=request.rid,
        input_ids=input_ids,
        sampling_params=request.sampling_params,
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        stream=request.stream,
        return_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
        logprob_start_len=request.logprob_start_len,
        extra_key=combine_extra_key(request.extra_key, request.cache_salt),
        priority=request.priority,
        sample_of=request.sample_of,
        created_time=now,
    )
